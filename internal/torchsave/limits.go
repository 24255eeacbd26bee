package torchsave

// Limits of what a file may ask for before its content has been checked.
const (
	// maxPickle is how many bytes the data.pkl of a stream may have: torch writes up to 234,
	// and 800 for 32 axes of 2^40.
	maxPickle = 4 << 10
	// maxFilePickle is the same of a file: 256 bytes for each of maxTensors.
	maxFilePickle = 16 << 20
	// maxValues is how many values a pickle may make, of up to some 100 bytes: torch makes
	// some 40 for each tensor.
	maxValues = 1 << 22
	// maxStack is how many values may wait: pickle puts up to 1000 pairs into a dict at a time.
	maxStack = 1 << 13
	// maxText is how many bytes a text may have, such as a tensor's name, and with the two
	// lines of a global the longest argument of an opcode.
	maxText = 4 << 10
	// maxHeld is how many bytes of a file are looked at together: an opcode, its length and
	// its text.
	maxHeld = maxText + 5
	// maxWide is how many bytes ZIP64's extra field has: two sizes and an offset.
	maxWide = 4 + 3*8
	// maxGlobal is how many bytes the two lines of a global may have: the known ones have up to 34.
	maxGlobal = 256
	// maxTensors is how many tensors a file may have: the largest that torch.save makes of
	// models have a few thousand.
	maxTensors = 1 << 16
	// maxRecordName is how many bytes the name of a record may have: a file's name and a few.
	maxRecordName = 512
	// maxRecordText is how many bytes a record may have that is no storage: torch writes 40.
	maxRecordText = 64
	// maxRepeated is how many bytes a tensor of a file may have if some of its elements
	// stand for several: others are no larger than the file.
	maxRepeated = 16 << 30
	// readAhead is how many bytes of a file are read at a time.
	readAhead = 64 << 10
	// quoted is how many characters an error quotes of what is not known.
	quoted = 80
)
