package torchsave

// Limits of what a file may ask for before its content has been checked.
const (
	// maxPickle is how many bytes the data.pkl of a stream may have: torch writes up to 234,
	// and 800 for 32 axes of 2^40.
	maxPickle = 4 << 10
	// maxTensors is how many tensors a file may have: models that torch.save writes have a
	// few thousand.
	maxTensors = 1 << 16
	// maxFilePickle is how many bytes the data.pkl of a file may have, 256 for each tensor.
	maxFilePickle = 256 * maxTensors
	// maxValues is how many values a pickle may make, of some 100 bytes: torch makes 40 for
	// each tensor.
	maxValues = 64 * maxTensors
	// atATime is how many pairs are put into a dict at a time, as by pickle.
	atATime = 1000
	// maxStack is how many values may wait: a few times those pairs.
	maxStack = 1 << 13
	// maxText is how many bytes a text may have, such as a tensor's name.
	maxText = 4 << 10
	// maxHeld is how many bytes are looked at together: an opcode, its length and its text.
	maxHeld = 5 + maxText
	// maxGlobal is how many bytes the opcode of a global may have; the known ones have up to 36.
	maxGlobal = 256
	// maxRecordName is how many bytes the name of a record may have: a file's name and a few.
	maxRecordName = 512
	// maxRecordText is the largest size of a record that is neither data.pkl nor a storage:
	// torch writes 40 bytes.
	maxRecordText = 64
	// maxWide is how many bytes ZIP64's extra field has: two sizes and an offset.
	maxWide = 4 + 3*8
	// maxRepeated is how many bytes a tensor of a file may have if elements of it lie in one
	// place; another is no larger than the file.
	maxRepeated = 16 << 30
	// readAhead is how many bytes of a file are read at a time.
	readAhead = 64 << 10
	// quoted is how many characters an error quotes of what is not known.
	quoted = 80
)
