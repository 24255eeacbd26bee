package torchsave

// Limits of what a file may ask for before its content has been checked.
const (
	// maxText is how many bytes a text may have, such as a tensor's name or that of a record,
	// and how many the data.pkl of a stream: torch writes up to 234, and 800 for 32 axes of 2^40.
	maxText = 4 << 10
	// maxFilePickle is how many bytes the data.pkl of a file may have: models that torch.save
	// writes have a few thousand tensors, of 256 bytes each.
	maxFilePickle = 16 << 20
	// maxValues is how many values a pickle may make, of some 100 bytes: torch makes 40 for
	// each tensor.
	maxValues = 4 << 20
	// maxStack is how many values may wait: a few times the 1000 pairs that pickle puts into a
	// dict at a time.
	maxStack = 1 << 13
	// maxRepeated is how many bytes a tensor of a file may have if elements of it lie in one
	// place; another is no larger than the file.
	maxRepeated = 16 << 30
)
