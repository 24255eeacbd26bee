package identity

import (
	"os"
	"syscall"
	"time"
)

// changed returns when the file or its attributes last changed, which, unlike the time of
// modification, nobody can set.
func changed(i os.FileInfo) time.Time {
	c := i.Sys().(*syscall.Stat_t).Ctim
	return time.Unix(c.Unix())
}
