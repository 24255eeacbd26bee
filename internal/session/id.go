package session

import (
	"bufio"
	"crypto/rand"
	"sync"

	"github.com/google/uuid"

	"github.com/tensorferry/tensorferry/tensor"
)

// ids draws randomness for 250 IDs at a time: a small call needs three, and a
// system call for each would show in its latency.
var ids = struct {
	sync.Mutex
	random *bufio.Reader
}{random: bufio.NewReaderSize(rand.Reader, 4000)}

// NewID returns a UUIDv7: unique, and sorted by time in logs and stores. Safe for
// concurrent use.
func NewID() tensor.ID {
	ids.Lock()
	defer ids.Unlock()
	return tensor.ID(uuid.Must(uuid.NewV7FromReader(ids.random)))
}
