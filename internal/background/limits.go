package background

import "time"

// turnTime is how long a turn lasts while others wait: some chunks of the usual size, and
// what the worst glob takes for the names of one page.
const turnTime = 10 * time.Millisecond
