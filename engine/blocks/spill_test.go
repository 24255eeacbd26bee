package blocks

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tensorferry/tensorferry/slab"
)

// spilling is a host whose results may be copied out into so many bytes.
func spilling(t *testing.T, memory, spill int64) (*host, *Spill) {
	h := newHost(t, config{MemoryBytes: memory, Workers: 1})
	s := &Spill{slab.NewPool(spill, slab.System), slab.NewBudget("spill", spill)}
	c := h.cfg
	c.Spill = s
	h.Engine = New(c)
	return h, s
}

// stalled opens a run whose blocks have all been filled that have memory, and none
// of whose results has been taken.
func stalled(t *testing.T, h *host, x []byte, width int64) *run {
	t.Helper()
	m := byteModel(t, h, 1, false, nil)
	c := bytesCall(int64(len(x))/width, width, width)
	c.Principal = slab.NewPrincipal("stalled")
	opened, err := m.Open(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	r := opened.(*run)
	go feed(t.Context(), r, x, width) // ends with the run
	synctest.Wait()
	return r
}

func feed(ctx context.Context, r *run, x []byte, width int64) {
	for {
		b, err := r.Borrow(ctx)
		if err != nil {
			return
		}
		copy(b.In[0], x[b.Row*width:])
		r.Filled(b)
	}
}

// take takes every result of a run, holding some for a while, and closes it.
func take(t *testing.T, r *run, x []byte, seed uint64) {
	t.Helper()
	random, held := rand.New(rand.NewPCG(seed, 0)), []func(){}
	y := make([]byte, len(x))
	for {
		o, err := r.Next(t.Context())
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		copy(y[o.Off:], o.Data)
		if held = append(held, o.Release); random.IntN(3) > 0 || len(held) > 1 {
			held[0]()
			held = held[1:]
		}
	}
	for _, release := range held {
		release()
	}
	for i := range x {
		if y[i] != x[i]+1 {
			t.Fatalf("byte %d is %d, want %d", i, y[i], x[i]+1)
		}
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
}

func TestResultsThatWaitGiveWayToOthers(t *testing.T) {
	const width, blocks = 64 << 10, 24
	x := make([]byte, blocks*width)
	for i := range x {
		x[i] = byte(i * 7 >> 5)
	}
	for name, spill := range map[string]int64{"with room beside": 64 * mib, "with little room beside": 512 << 10} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h, s := spilling(t, mib, spill)
				one, two := stalled(t, h, x, width), stalled(t, h, x, width)
				used, _, limit := h.Budget().Used()
				if limit-used >= 4*width {
					t.Fatalf("there is room left: %d of %d bytes are used", used, limit)
				}
				time.Sleep(time.Second)
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				c := bytesCall(blocks, width, width)
				c.Principal = slab.NewPrincipal("third")
				opened, err := byteModel(t, h, 1, false, nil).Open(ctx, c)
				if err != nil {
					t.Fatal(err)
				}
				three := opened.(*run)
				go feed(t.Context(), three, x, width)
				take(t, three, x, 3)
				if !copied(one) && !copied(two) {
					t.Error("no result was copied out")
				}
				take(t, one, x, 1)
				take(t, two, x, 2)
				idle(t, h)
				if used, peak, _ := s.Budget.Used(); used != 0 || peak == 0 || peak > spill {
					t.Errorf("beside, %d bytes are used, %d at most", used, peak)
				}
				if slabs, _ := s.Pool.Live(); slabs != 0 {
					t.Errorf("beside, %d slabs are held", slabs)
				}
			})
		})
	}
}

// copied reports whether results of a run were copied out.
func copied(r *run) bool {
	return slices.ContainsFunc(r.works, func(w *Work) bool { return w.spilled })
}

func TestARunThatIsClosedGivesBackWhatWasCopiedOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const width = 64 << 10
		h, s := spilling(t, mib, mib)
		r := stalled(t, h, bytes.Repeat([]byte{1}, 24*width), width)
		time.Sleep(time.Second)
		if !h.spare() || !copied(r) {
			t.Fatal("nothing was copied out")
		}
		o, err := r.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		time.AfterFunc(time.Second, o.Release)
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		idle(t, h)
		used, _, _ := s.Budget.Used()
		if slabs, _ := s.Pool.Live(); used != 0 || slabs != 0 {
			t.Errorf("%d bytes and %d slabs are held", used, slabs)
		}
	})
}
