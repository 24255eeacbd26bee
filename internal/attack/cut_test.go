package attack

import (
	"io"
	"net"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/testkit"
)

func TestAConnectionBreaksAfterSoManyBytes(t *testing.T) {
	testkit.Start(t)
	near, far := net.Pipe()
	came := make(chan int, 1)
	go func() { // ends with the connection
		_, _ = far.Write(make([]byte, 300))
		data, _ := io.ReadAll(far)
		came <- len(data)
	}()
	c, _, err := CutAfter(1000, nil).ClientHandshake(t.Context(), "", near)
	require.NoError(t, err)
	_, err = io.ReadFull(c, make([]byte, 300))
	require.NoError(t, err)
	_, err = io.Copy(c, strings.NewReader(strings.Repeat("x", 5000)))
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	require.Equal(t, 700, <-came)
}
