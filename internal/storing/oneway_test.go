package storing

import (
	"io"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/tensor"
)

// deadConn is a connection that died before anything was sent.
type deadConn struct{ Conn }

func (deadConn) Send(_ *frame.Frame, held interface{ Release() }) error {
	if held != nil {
		held.Release()
	}
	return io.EOF
}

type releases int

func (r *releases) Release() { *r++ }

func TestAPullWhoseConnectionDiesBeforeItsHelloKeepsNoView(t *testing.T) {
	testkit.Start(t)
	for name, f := range map[string]*frame.Frame{
		"a hello and a chunk": {Hello: &frame.Hello{Version: frame.Version}, Chunk: frame.Chunk{Tensor: tensor.NewID(), Data: [][]byte{{1}}}},
		"a chunk":             {Chunk: frame.Chunk{Tensor: tensor.NewID(), Data: [][]byte{{1}}}},
	} {
		t.Run(name, func(t *testing.T) {
			var held releases
			p := &pullConn{Conn: deadConn{}}
			require.ErrorIs(t, p.Send(f, &held), io.EOF)
			require.EqualValues(t, 1, held)
		})
	}
}
