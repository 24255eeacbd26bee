package serve

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/testkit"
)

func TestALogSaysHowManyLinesItLost(t *testing.T) {
	testkit.Start(t)
	w := &logWriter{lines: make(chan []byte, 2), ended: make(chan struct{})}
	said := make(chan int64, 1)
	for range 5 {
		_, err := w.Write([]byte("x\n"))
		require.NoError(t, err)
	}
	var to failing = 1
	go w.write(&to, func(n int64) { said <- n })
	require.EqualValues(t, 4, <-said, "three that found no room, and the first")
	w.flush()
	<-w.ended
}

// failing is a writer that fails so often.
type failing int

func (f *failing) Write(p []byte) (int, error) {
	if *f--; *f >= 0 {
		return 0, errors.New("full")
	}
	return len(p), nil
}
