package codec

const (
	// PieceBytes are read, and then summed or hashed, at a time: they stay in a core's own
	// cache, and a system call for them is rare enough.
	PieceBytes = 256 << 10
	// minEncode is the shortest chunk, in bytes, that is encoded: less would save
	// nothing beside a packet's own bytes.
	minEncode = 512
	// leastGain: an encoded payload is sent when it saves 1/leastGain of the bytes. For
	// less, decoding takes longer than a network of 10 Gbit/s does for the bytes.
	leastGain = 16
	// coders is the most encoders, and the most decoders, of the process at a time, one
	// per CPU. Each keeps memory for two chunks, made at its first use.
	coders = 16
	// waitingBytes bounds the encoded payload of the process that waits to be sent, which
	// peers that do not read could make grow: what is beyond is sent unencoded.
	waitingBytes = 64 << 20
	// keptBytes is how much memory of payloads that were sent is kept for the next.
	keptBytes = 16 << 20
	// fetchBytes is fetched, and then summed, at a time: it stays in the smallest cache.
	fetchBytes = 8 << 10
)
