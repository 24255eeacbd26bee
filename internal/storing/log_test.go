package storing

import (
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/internal/serving"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/tensor"
)

// heap is what lives.
func heap() int64 {
	runtime.GC()
	runtime.GC() // what a pool had is gone the second time
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

func TestRecordsOfTheWorstTransfersTakeNoMoreThanTheySay(t *testing.T) {
	testkit.Start(t)
	const limit = 16 << 20
	for what, perTransfer := range map[string]int{
		"few transfers, many tensors": 2 * Tensors, // of which the last are kept
		"many transfers, few tensors": recordTensorsKept / recordsKept,
	} {
		t.Run(what, func(t *testing.T) {
			before := heap()
			rs := new(transferLog)
			failed := strings.Repeat("y", 1<<10)
			for number := 0; number < 2*recordTensorsKept; {
				number++
				r, err := rs.begin(worstID(number), serving.Pull, nil, false, "")
				require.NoError(t, err)
				for range perTransfer {
					number++
					name := fmt.Sprintf("%0*d", store.MaxName, number)
					p := rs.tensor(r, worstID(number), name, 1)
					rs.tensorEnded(p, frame.Summary{Tensor: worstID(number), Name: name, Message: strings.Repeat("x", 33<<10)})
				}
				rs.end(r, frame.Internal, failed)
			}
			require.LessOrEqual(t, rs.kept, recordTensorsKept)
			require.Greater(t, rs.kept, recordTensorsKept-2*Tensors, "the worst was not reached")
			require.Less(t, heap()-before, int64(limit))
			runtime.KeepAlive(rs)
		})
	}
}

func worstID(n int) tensor.ID { return tensor.ID{1, byte(n), byte(n >> 8), byte(n >> 16)} }

// TestASetThatIsStoredIsKnownAsStored cancels the call of a set before and after the set is
// stored.
func TestASetThatIsStoredIsKnownAsStored(t *testing.T) {
	testkit.Start(t)
	for name, after := range map[string]bool{"cancelled before": false, "cancelled after": true} {
		t.Run(name, func(t *testing.T) {
			var s Service
			id := tensor.NewID()
			r, err := s.log.begin(id, serving.Push, nil, true, "")
			require.NoError(t, err)
			s.log.tensorEnded(s.log.tensor(r, tensor.NewID(), "x", 1), frame.Summary{})
			if after {
				s.log.stored(r)
			}
			require.True(t, s.log.end(r, frame.Cancelled, "cancelled"))
			if !after {
				s.log.stored(r)
			}
			of, tensors, known := s.State(id)
			require.True(t, known)
			require.False(t, of.Open)
			require.Equal(t, frame.OK, of.Code)
			require.Empty(t, of.Message)
			require.Equal(t, frame.OK, tensors[0].Summary.Code)
		})
	}
}
