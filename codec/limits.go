package codec

const (
	mib = 1 << 20
	// digestPiece is how many bytes are read again at a time, to be digested when they
	// did not come in order: less than a processor's cache.
	digestPiece = 256 << 10
	// minEncode is the shortest chunk, in bytes, that is worth encoding: what it
	// could save is lost among the bytes of a packet.
	minEncode = 512
	// leastGain: an encoded payload is sent when this part (1/leastGain) of the
	// bytes is saved. For less, the receiver would spend more on the decoding than
	// a network of 10 Gbit/s does on the bytes.
	leastGain = 16
	// coders is how many encode, how many decode, and how many decode into files at
	// a time, in the whole process, when it has as many CPUs. Each has memory for
	// two chunks, which is made at its first use and kept.
	coders = 16
	// waitingBytes is the most encoded payload of the whole process that waits for
	// gRPC to write it out: what is beyond goes unencoded, from where it lies. Peers
	// that do not read can make this process keep no more.
	waitingBytes = 64 * mib
	// keptBytes is how much memory of payloads that were sent is kept for the next.
	keptBytes = 16 * mib
)
