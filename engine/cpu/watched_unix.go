//go:build unix

package cpu

import "syscall"

// watched has the runtime interrupt a block that takes long. Its monitor sleeps until it hears of a system
// call, which it does not of those of a link.Brief connection.
func watched() { _, _ = syscall.Read(-1, nil) }
