package measure

import "time"

const (
	// Many is how many tensors a push or a pull of many has.
	Many = 10_000
	// jobWait is how long one job may take before the run is given up: a tensor of
	// 256 MiB at 2 MB/s.
	jobWait = 2 * time.Minute
)
