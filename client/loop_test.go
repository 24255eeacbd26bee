package client_test

import (
	"bytes"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/stream"
	"github.com/tensorferry/tensorferry/tensor"
)

// loop makes each row of an input when the result of the one before has come, in regions or to
// a writer. first is called before the first.
func loop(t *testing.T, c *client.Client, rows, width int, next, writes bool, first func()) {
	t.Helper()
	x := testkit.Bytes(rows*width, uint64(width))
	row := func(i int) []byte { return x[i*width : (i+1)*width] }
	arrived := make(chan int64, 1<<16) // ends of regions
	in := client.Input{Desc: tensor.Desc{DType: tensor.Uint8, Shape: []int64{int64(rows), int64(width)}}}
	r, w := io.Pipe()
	turn := make(chan []byte)
	if next {
		in.Next = func(over <-chan struct{}) ([]byte, func(), error) {
			select {
			case p := <-turn:
				return p, func() {}, nil
			case <-over:
				return nil, nil, io.ErrUnexpectedEOF
			}
		}
	} else {
		in.Reader = r
	}
	made := make(chan error, 1)
	go func() {
		first()
		var got int64
		for i := range rows {
			for got < int64(i*width) {
				var end int64
				more := false
				select {
				case end, more = <-arrived:
				case <-time.After(3 * time.Second):
				}
				if !more {
					_ = w.CloseWithError(io.ErrUnexpectedEOF)
					made <- fmt.Errorf("%d rows of %d bytes were made, %d bytes came", i, width, got)
					return
				}
				got = max(got, end)
			}
			if next {
				turn <- row(i)
			} else if _, err := w.Write(row(i)); err != nil {
				made <- err
				return
			}
		}
		made <- nil
	}()
	request := client.Request{Model: "echo", Inputs: []client.Input{in}, Timeout: 30 * time.Second}
	var written bytes.Buffer
	if writes {
		to := writer(func(p []byte) (int, error) {
			n, err := written.Write(p)
			arrived <- int64(written.Len())
			return n, err
		})
		request.Results = map[string]client.Sink{"y": client.Writer(func(tensor.Desc) (io.Writer, error) { return to, nil })}
	}
	call, err := c.Call(t.Context(), request)
	require.NoError(t, err)
	defer func() { _ = r.Close() }()
	for region, err := range call.Regions() {
		if err == nil {
			arrived <- region.Off + int64(len(region.Data))
		}
	}
	out, err := call.Wait()
	close(arrived)
	require.NoError(t, <-made)
	require.NoError(t, err)
	if !writes {
		written.Write(out["y"].Data)
	}
	require.True(t, bytes.Equal(x, written.Bytes()))
}

func TestARowMayBeMadeFromTheResultOfTheOneBefore(t *testing.T) {
	testkit.Start(t)
	f := start(t, "tcp", client.Config{})
	for _, width := range []int{1, 3, 512, 1000, 64 << 10, mib - 1, mib, mib + 1, 3 * mib} {
		for _, next := range []bool{false, true} {
			for _, writes := range []bool{false, true} {
				t.Run(fmt.Sprintf("width=%d/next=%t/writes=%t", width, next, writes), func(t *testing.T) {
					loop(t, f.client, 12, width, next, writes, func() {})
				})
			}
		}
	}
}

func TestAFirstRowMayComeLate(t *testing.T) {
	testkit.Start(t)
	for _, next := range []bool{false, true} {
		bubble(t, func(t *testing.T) {
			f := startServer(t, "tcp", client.Config{}, func(c *serverConfig) { c.Session.ChunkIdle = stream.Instant(time.Second) })
			loop(t, f.client, 5, 1000, next, false, func() { <-time.After(20 * time.Second) })
		})
	}
}
