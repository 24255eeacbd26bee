package identity

import "time"

const (
	// fileBytes is the largest file of certificates, keys or tokens.
	fileBytes = 1 << 20
	// leastToken and mostToken bound the characters of a token: fewer can be guessed, more
	// do not fit into an RPC's metadata.
	leastToken = 16
	mostToken  = 4096
	// lookEvery is how often the files are looked at, at most.
	lookEvery = time.Second
	// A client that does not speak TLS is told so, within this time and so many frames of so
	// many bytes, which is also what is read behind its first RPC.
	goodbye       = time.Second
	goodbyeFrames = 16
	goodbyeBytes  = 16 << 10
	// validDays is how long a certificate of a server or client is valid that
	// WriteCertificates makes, and authorityDays its authority's.
	validDays     = 365
	authorityDays = 3650
	// clockSkew is how much another machine's clock may be behind.
	clockSkew = 5 * time.Minute
)
