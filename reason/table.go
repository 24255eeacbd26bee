package reason

// Table has a row for each reason, and first one for each code, which is for peers that give
// no other reason. docs/errors.md shows it.
var Table = []Row{
	{"CANCELLED", "CANCELLED", Client, false, ExitFailure, "the caller cancelled it, or closed the session or the client", ""},
	{"UNKNOWN", "UNKNOWN", Either, false, ExitFailure, "the peer gave a code that gRPC does not have, or failed a tensor with OK", ""},
	{"INVALID_ARGUMENT", "INVALID_ARGUMENT", Client, false, ExitFailure, "a rule of wire.md was broken, or a request is wrong", ""},
	{"DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", Either, false, ExitFailure, "it took too long, or made no progress for as long as limits.md allows; the text says who was waited for", ""},
	{"NOT_FOUND", "NOT_FOUND", Client, false, ExitFailure, "there is no such thing, or none that the caller may see", "tensorferry ls" + Asked + " lists the tensors and sources of a server, tensorferry models" + Asked + " its models"},
	{"ALREADY_EXISTS", "ALREADY_EXISTS", Client, false, ExitFailure, "another one has the name or the ID", "tensorferry push" + Asked + " NAME=FILE stores a tensor under another name"},
	{"PERMISSION_DENIED", "PERMISSION_DENIED", Server, false, ExitAuth, "the server knows the caller, and its roles do not allow this", ""},
	{"RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED", Either, false, ExitLimit, "over a limit or a budget; if the server says when, it can be tried again then, else with less", "tensorferry info" + Asked + " lists the server's limits"},
	{"FAILED_PRECONDITION", "FAILED_PRECONDITION", Either, false, ExitFailure, "the server is not in a state, or not of a kind, that allows it", ""},
	{"ABORTED", "ABORTED", Client, true, ExitFailure, "something changed meanwhile", ""},
	{"OUT_OF_RANGE", "OUT_OF_RANGE", Client, false, ExitFailure, "only a server of another kind says this", ""},
	{"UNIMPLEMENTED", "UNIMPLEMENTED", Server, false, ExitFailure, "the server does not have this RPC: it is older, or of another kind", ""},
	{"INTERNAL", "INTERNAL", Server, false, ExitFailure, "a defect; a cause that is not for all callers is kept under the call's id (tensorferry info --call)", ""},
	{"UNAVAILABLE", "UNAVAILABLE", Either, true, ExitConnection, "the connection broke, or the server cannot do it now", "the connection broke, or the server takes nothing now; run it again"},
	{"DATA_LOSS", "DATA_LOSS", Either, true, ExitIntegrity, "bytes were damaged or are missing: a chunk arrived damaged three times, or once in a push or a pull by itself, or a digest differs", "try it again; if it stays so, the server's disk or the way there does damage: push the tensor anew"},
	{"UNAUTHENTICATED", "UNAUTHENTICATED", Client, false, ExitAuth, "one side does not know the other", "--ca names the CA of the server's certificate; --token, or --cert and --key, identify you; for a server without TLS leave all of them out"},
	{NoAnswer, "DEADLINE_EXCEEDED", Server, true, ExitConnection, "the server says nothing, or makes no progress", "something listens there and says nothing: a hung server, or not a tensorferry server"},
}

// NoAnswer does not exit as its code does.
const NoAnswer Reason = "NO_ANSWER"

// The reasons that are not only codes.
var (
	NoConnection = is("NO_CONNECTION", "UNAVAILABLE", Either, true, "nothing listens at the server's address, it cannot be reached, or it ends connections at once", "is the server running? start one with tensorferry serve, or name it with "+Flag+" host:port")
	HostNotFound = is("HOST_NOT_FOUND", "UNAVAILABLE", Client, false, "the host of the server's address has no IP address", "name the server with "+Flag+" host:port")
	NotServer    = is("NOT_A_TENSORFERRY_SERVER", "UNAVAILABLE", Client, false, "a gRPC, HTTP or TLS server of another kind answers", "something answers there, but it is not a tensorferry server")
	CircuitOpen  = is("TOO_MANY_ATTEMPTS", "UNAVAILABLE", Either, true, "many attempts in a row found no server, so none is made for ten seconds", "the server takes nothing now: try again later")
	Input        = is("BAD_INPUT", "INVALID_ARGUMENT", Client, false, "an input does not match its desc: a reader ended early, or a slice has the wrong size; or a request makes no sense", "")
	InputIdle    = is("INPUT_IDLE", "DEADLINE_EXCEEDED", Client, false, "the caller's own input or output was idle for too long", "--input-idle sets how long input and output may be idle")

	ServerWithoutTLS    = is("SERVER_WITHOUT_TLS", "UNAUTHENTICATED", Client, false, "the server does not speak TLS", "leave out --tls, --ca, --cert, --key and --token")
	ServerCertUnknown   = is("SERVER_CERTIFICATE_NOT_TRUSTED", "UNAUTHENTICATED", Client, false, "the server's certificate is not signed by an authority that the client knows", "--ca names the file with the CA that has signed it")
	ServerCertHost      = is("SERVER_CERTIFICATE_FOR_ANOTHER_HOST", "UNAUTHENTICATED", Client, false, "the server's certificate is for other hosts", "--server-name says which of these names the server is to have")
	ServerCertNoHost    = is("SERVER_CERTIFICATE_WITHOUT_HOST", "UNAUTHENTICATED", Server, false, "the server's certificate is for no host", "its operator has to make one with the host in subjectAltName")
	ServerCertExpired   = is("SERVER_CERTIFICATE_EXPIRED", "UNAUTHENTICATED", Server, false, "the server's certificate has expired", "its operator has to renew it")
	TLSRequired         = is("TLS_REQUIRED", "UNAUTHENTICATED", Client, false, "the server speaks TLS only", "--ca names the CA of the server's certificate; --token, or --cert and --key, identify you")
	CredentialsRequired = is("CREDENTIALS_REQUIRED", "UNAUTHENTICATED", Client, false, "the server wants a client certificate or a token", "--token names the file with your token; or --cert and --key a certificate")
	CertRequired        = is("CLIENT_CERTIFICATE_REQUIRED", "UNAUTHENTICATED", Client, false, "the server wants a client certificate", "--cert and --key identify you")
	CertUnknown         = is("CLIENT_CERTIFICATE_NOT_TRUSTED", "UNAUTHENTICATED", Client, false, "the client's certificate is not signed by an authority that the server knows, or is otherwise wrong", "--cert and --key name one that a CA of the server's has signed")
	CertUse             = is("CLIENT_CERTIFICATE_FOR_ANOTHER_USE", "UNAUTHENTICATED", Client, false, "the client's certificate is not for clients", "--cert names one that is for clients (extendedKeyUsage clientAuth)")
	CertExpired         = is("CLIENT_CERTIFICATE_EXPIRED", "UNAUTHENTICATED", Client, false, "the client's certificate has expired", "--cert and --key name a new one")
	TokenRequired       = is("TOKEN_REQUIRED", "UNAUTHENTICATED", Client, false, "the server wants a token", "--token names the file with it")
	TokenUnknown        = is("TOKEN_UNKNOWN", "UNAUTHENTICATED", Client, false, "the server does not know the token", "--token names the file with it")

	Draining     = is("SERVER_DRAINING", "UNAVAILABLE", Server, true, "the server opens nothing new, because it is about to end", "the server takes nothing now: try again later")
	ShuttingDown = is("SERVER_SHUTTING_DOWN", "UNAVAILABLE", Server, true, "the server ends", "the server takes nothing now: try again later")
	Connections  = is("TOO_MANY_CONNECTIONS", "UNAVAILABLE", Server, true, "all connections that the server takes are open", "the server takes nothing now: try again later")
	Files        = is("OUT_OF_FILES", "UNAVAILABLE", Server, true, "the server has no file descriptors left", "the server takes nothing now: try again later")
	Open         = is("TOO_MANY_OPEN", "RESOURCE_EXHAUSTED", Either, true, "as many calls, transfers or sessions are open as may be", "tensorferry info"+Asked+" lists the server's limits")
	Memory       = is("OUT_OF_MEMORY", "RESOURCE_EXHAUSTED", Server, true, "the server has no memory for it now", "try again later; tensorferry info"+Asked+" lists the server's limits")
	Budget       = is("OVER_MEMORY_BUDGET", "RESOURCE_EXHAUSTED", Client, false, "it needs more memory than the server's whole budget", "send smaller tensors, or have the server started with a larger --memory")
	TooLarge     = is("TENSOR_TOO_LARGE", "RESOURCE_EXHAUSTED", Client, false, "a tensor is larger than the server takes", "tensorferry info"+Asked+" lists the server's limits")
	RoleCalls    = is("ROLE_HAS_TOO_MANY_CALLS", "RESOURCE_EXHAUSTED", Client, true, "the caller has as many calls open as its role allows", "wait for one to end")
	RoleBytes    = is("ROLE_HAS_TOO_MANY_BYTES", "RESOURCE_EXHAUSTED", Client, false, "the tensors of the caller's role have as many bytes as it allows", "tensorferry ls"+Asked+" lists them, tensorferry rm"+Asked+" deletes some")

	ModelNotFound    = is("MODEL_NOT_FOUND", "NOT_FOUND", Client, false, "the server has no such model, or none that the caller may see", "tensorferry models"+Asked+" lists the models")
	ModelInput       = is("MODEL_REFUSES_INPUT", "FAILED_PRECONDITION", Client, false, "the model does not take an input of this data type or shape", "tensorferry models"+Asked+" says what it takes")
	ModelParam       = is("MODEL_REFUSES_PARAMETER", "INVALID_ARGUMENT", Client, false, "the model does not have this parameter, or does not take this value of it", "tensorferry models"+Asked+" says what it takes")
	ModelPorts       = is("MODEL_HAS_OTHER_PORTS", "INVALID_ARGUMENT", Client, false, "the call names inputs or results that the model does not have", "tensorferry models"+Asked+" says what it takes")
	ModelState       = is("MODEL_NOT_READY", "FAILED_PRECONDITION", Client, false, "the model's state, or an element of an input, does not allow it", "")
	StateLost        = is("STATE_LOST", "FAILED_PRECONDITION", Either, false, "what a sequence of calls had on the server is gone", "begin another sequence, with the rows from the first on")
	ModelFailed      = is("MODEL_FAILED", "INTERNAL", Server, false, "the model's own code failed or panicked", "")
	ModelUnavailable = is("MODEL_UNAVAILABLE", "UNAVAILABLE", Server, true, "the model, or its device, cannot run now", "the server takes nothing now: try again later")
	CallTimeout      = is("CALL_TIMEOUT", "DEADLINE_EXCEEDED", Client, false, "the call's timeout has passed", "")

	NoStore          = is("NO_STORE", "FAILED_PRECONDITION", Server, false, "the server has no store", "its operator starts it with --store")
	StoreFull        = is("STORE_FULL", "RESOURCE_EXHAUSTED", Either, true, "the server's store is full", "tensorferry ls"+Asked+" lists them, tensorferry rm"+Asked+" deletes some")
	StoreSlow        = is("STORE_FULL_FOR_TOO_LONG", "DEADLINE_EXCEEDED", Either, true, "the server had no room for the tensor in time", "")
	StoreTooSmall    = is("STORE_TOO_SMALL", "RESOURCE_EXHAUSTED", Server, false, "the tensor is larger than the server's store", "tensorferry serve --store memory:SIZE, or --store FOLDER")
	DiskFull         = is("DISK_FULL", "RESOURCE_EXHAUSTED", Server, true, "the server's disk is full", "free some on the server's disk; tensorferry rm"+Asked+" deletes tensors")
	StoreReadOnly    = is("STORE_READ_ONLY", "FAILED_PRECONDITION", Server, false, "the server's store takes no tensors", "")
	StoreUnwritable  = is("STORE_UNWRITABLE", "FAILED_PRECONDITION", Server, false, "the server's store cannot be written; its log says why", "")
	StoreUnavailable = is("STORE_UNAVAILABLE", "UNAVAILABLE", Server, true, "the server's store cannot be used now; its log says why", "the server takes nothing now: try again later")
	TensorNotFound   = is("TENSOR_NOT_FOUND", "NOT_FOUND", Client, false, "the store has no such tensor or source, or none that the caller may see", "tensorferry ls"+Asked+" lists the tensors and sources of a server, tensorferry models"+Asked+" its models")
	TensorExists     = is("TENSOR_EXISTS", "ALREADY_EXISTS", Client, false, "a tensor in a file of the store has the name", "tensorferry push"+Asked+" NAME=FILE stores a tensor under another name")
	TensorInFile     = is("TENSOR_IN_FILE", "FAILED_PRECONDITION", Server, false, "the tensor is part of a file, and cannot be deleted by itself", "")
	TensorReplaced   = is("TENSOR_REPLACED", "ABORTED", Client, true, "a tensor of a large pull was replaced since the pull began", "run it again")
	TensorVanished   = is("TENSOR_VANISHED", "DATA_LOSS", Server, true, "somebody shortened a file of the store while it was sent", "try it again; replace files by renaming new ones over them")
	BadName          = is("BAD_NAME", "INVALID_ARGUMENT", Client, false, "a name, a glob or metadata that the store does not take", "")
	BadSource        = is("BAD_SOURCE", "INVALID_ARGUMENT", Client, false, "a parameter that the source does not take", "")
)

// is adds a row to the table. The exit code is that of the code.
func is(r, code Reason, side Side, retry bool, title, do string) Reason {
	Table = append(Table, Row{r, code, side, retry, Find(code, "").Exit, title, do})
	return r
}
