package shelf

const (
	// viewBytes is how many bytes of released views all stores of files keep for reuse: two
	// chunks each of several pulls.
	viewBytes = 32 << 20
)
