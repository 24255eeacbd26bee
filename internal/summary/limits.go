package summary

const (
	// block is how many elements are looked at together: at most 64 KiB of them,
	// and as many float64, stay in a processor's cache.
	block = 4096
	// binCount is how many bins there are: each of the columns that a histogram is
	// shown in, some 40, then has 200 or more, so its edges are off by 0.5 % or less.
	binCount = 1 << 14
	// leastBin is the exponent of the narrowest bin's width: its inverse is finite.
	leastBin = -1000
)
