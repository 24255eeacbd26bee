// Package transfer moves tensors one way over a connection of frames, the same for a push
// and a pull: a Sender cuts and sums them, a Receiver checks their chunks and has
// them put where they rest.
//
// It refuses to resolve names and to know stores or files: whoever uses it says
// where bytes come from and go to. There is no way back for credits here. HTTP/2
// is the back-pressure: the next frame is read when the last chunk has its place,
// so that a side needs no more memory than a chunk, and gRPC's windows. It owns no
// payload bytes; what it sends is held until the connection has let go of it.
package transfer
