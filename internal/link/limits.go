package link

const (
	// Version is of the protocol, docs/link.md. Both sides name theirs in hello.
	Version = 1
	// PacketBytes is the largest message. Socket buffers of the default size hold three.
	PacketBytes = 64 << 10
	// segmentBytes is what small ranges are cut from: one mapping in the guest for many
	// of them. A range of more than half of it has a memory of its own.
	segmentBytes = 2 << 20
	// waitingTakes bounds the takes of a guest that wait for its quota.
	waitingTakes = 1024
	// mostNews bounds what waits to be told to a guest: ranges, each of which it owns once,
	// so that only one which does not read gets there.
	mostNews = 1 << 16
)
