package identity

import "time"

const (
	// fileBytes is the largest file of certificates, keys or tokens.
	fileBytes = 1 << 20
	// leastToken and mostToken limit the characters of a token: shorter ones can be
	// guessed, longer ones leave little room in an RPC's metadata, of which a server takes 16 KiB.
	leastToken = 16
	mostToken  = 4096
	// lookEvery is the minimum time between two checks of the files.
	lookEvery = time.Second
	// A client that does not speak TLS, or for which there is no room, is told so. goodbye and goodbyeFrames limit the time
	// and the number of frames that this may take.
	goodbye       = time.Second
	goodbyeFrames = 16
	// handshakeBytes is the most that a client may send during its handshake: chainBytes,
	// its hello, and what of its HTTP/2 arrives with their end; and in a frame, and after its frames,
	// if it is told that it is refused.
	handshakeBytes = 64 << 10
	// chainCerts and chainBytes limit a client's certificate with its intermediate ones.
	// A stranger's are kept, too, and each one may have to be tried as the issuer of each
	// other. Chains in use have up to four certificates, of 1 or 2 KiB.
	chainCerts = 5
	chainBytes = 16 << 10
	// refusedFor is how long a client certificate is refused before it is checked again,
	// because it may have become valid.
	refusedFor = 5 * time.Second
	// In the last part (1/warnPart) of its certificate's time a server logs every warnEvery
	// that it expires.
	warnPart  = 10
	warnEvery = time.Hour
	// validDays is how long the server and client certificates of WriteCertificates are
	// valid; the authority's is ten times as long.
	validDays = 365
	// hostBytes is the longest DNS name (RFC 1035, section 2.3.4).
	hostBytes = 253
	// clockSkew is how much the clock of another machine may be behind.
	clockSkew = 5 * time.Minute
)
