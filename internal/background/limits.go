package background

import "time"

// turnTime is how long a turn lasts while others wait, and how long one who waits behind forty
// others waits for each: ten chunks that are hashed, or four pieces that are generated.
const turnTime = 2 * time.Millisecond
