//go:build linux

// Package roads joins two network namespaces by a link of a chosen delay, rate, queue
// and loss, between two TUN devices that this process reads and writes. TCP runs from
// end to end, as it does between two machines. It refuses to change anything outside its
// namespaces, and to run where the system has none: New then says why, and callers
// measure nothing. Benchmarks and tests use it. Packets are never handed out.
package roads

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// Way is one direction of a road.
type Way struct {
	// Delay is how long a packet travels once it is on the line: half the round trip.
	Delay time.Duration
	// Rate is in bits of IP packets per second. Zero means DefaultRate.
	Rate int64
	// Queue is the bytes that may wait for the line. What does not fit is dropped.
	// Zero means twice Rate × Delay, at least leastQueue packets.
	Queue int
	// Loss is the share of packets, from 0 to 1, that get lost.
	Loss float64
}

// Link is a road to be built.
type Link struct {
	Way
	// MTU is that of both devices. Zero means 1500.
	MTU int
	// Congestion is the congestion control of both ends. Empty means cubic.
	Congestion string
	// Seed of what gets lost.
	Seed uint64
}

// Road is a link that is up. Its methods are safe for concurrent use.
type Road struct {
	Link
	Ends [2]*End
	ways [2]*way // of what each end sends
	all  sync.WaitGroup
	shut func() error
}

// Counts is what a way has done so far.
type Counts struct {
	Packets, Bytes int64         // that arrived
	Lost, Dropped  int64         // packets, at random and by a full queue
	Late           time.Duration // the most that a packet was delivered after its time, since the last Counts
}

// UnavailableError says why this system has no roads.
type UnavailableError struct{ Why string }

func (e *UnavailableError) Error() string { return "roads: no network namespaces here: " + e.Why }

// New builds a road. Its goroutines and processes end with Close.
func New(ctx context.Context, l Link) (_ *Road, err error) {
	l.MTU = cmp.Or(l.MTU, DefaultMTU)
	l.Congestion = cmp.Or(l.Congestion, DefaultCongestion)
	if err := l.Way.check(); err != nil {
		return nil, err
	}
	if l.MTU < leastMTU || l.MTU > mostMTU {
		return nil, fmt.Errorf("roads: MTU %d, want %d to %d", l.MTU, leastMTU, mostMTU)
	}
	r := &Road{Link: l}
	r.shut = sync.OnceValue(r.close)
	defer func() {
		if err != nil {
			err = errors.Join(err, r.Close())
		}
	}()
	for i := range r.Ends {
		if r.Ends[i], err = newEnd(ctx, l, addresses[i]); err != nil {
			return nil, err
		}
	}
	for i := range r.ways {
		if r.ways[i], err = newWay(r.Ends[i].tun, r.Ends[1-i].tun, l, uint64(i)); err != nil {
			return nil, err
		}
	}
	for _, w := range r.ways {
		r.all.Go(w.run)
	}
	return r, nil
}

// addresses of the two ends, in a network of their own: RFC 5737.
var addresses = [2]netip.Addr{netip.AddrFrom4([4]byte{192, 0, 2, 1}), netip.AddrFrom4([4]byte{192, 0, 2, 2})}

// Counts returns what has become of the packets that an end sent.
func (r *Road) Counts(end int) Counts {
	w := r.ways[end]
	return Counts{w.packets.Load(), w.bytes.Load(), w.lost.Load(), w.dropped.Load(), time.Duration(w.late.Swap(0))}
}

// Close ends every process in both ends, the namespaces and the goroutines. Closing twice
// is a no-op.
func (r *Road) Close() error { return r.shut() }

func (r *Road) close() (err error) {
	for _, w := range r.ways {
		if w != nil {
			w.end()
		}
	}
	r.all.Wait()
	for _, w := range r.ways {
		if w != nil {
			w.release()
		}
	}
	for _, e := range r.Ends {
		if e != nil {
			err = errors.Join(err, e.close())
		}
	}
	return err
}

// check returns an error if no such way can be.
func (w Way) check() error {
	switch {
	case w.Delay < 0 || w.Delay > mostDelay:
		return fmt.Errorf("roads: a delay of %v, want 0 to %v", w.Delay, mostDelay)
	case w.Rate < 0 || w.Rate > mostRate:
		return fmt.Errorf("roads: a rate of %d bit/s, want 0 to %d", w.Rate, int64(mostRate))
	case w.Queue < 0 || w.Queue > mostQueue:
		return fmt.Errorf("roads: a queue of %d bytes, want 0 to %d", w.Queue, mostQueue)
	case w.Loss < 0 || w.Loss > 1:
		return fmt.Errorf("roads: a share of %g lost, want 0 to 1", w.Loss)
	}
	return nil
}

// rate and queue return those of w, or the defaults.
func (w Way) rate() int64 { return cmp.Or(w.Rate, DefaultRate) }

func (w Way) queue(mtu int) int64 {
	if w.Queue > 0 {
		return int64(w.Queue)
	}
	return min(max(w.inTime(2*w.Delay), int64(leastQueue*mtu)), mostQueue)
}

// inTime returns the bytes that pass in d.
func (w Way) inTime(d time.Duration) int64 { return int64(float64(w.rate()) / 8 * d.Seconds()) }

// needs returns the time that n bytes take to pass.
func (w Way) needs(n int) time.Duration {
	return time.Duration(float64(n) * 8e9 / float64(w.rate()))
}

// T is what Start needs of a *testing.T. Programs that measure do not carry the test framework.
type T interface {
	Helper()
	Context() context.Context
	Cleanup(func())
	Skip(args ...any)
	Fatal(args ...any)
	Error(args ...any)
}

// Start builds a road for a test, which ends with it. Where there are none, the test is
// skipped.
func Start(t T, l Link) *Road {
	t.Helper()
	r, err := New(t.Context(), l)
	if no := new(UnavailableError); errors.As(err, &no) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

// counters of a way.
type counters struct{ packets, bytes, lost, dropped, late atomic.Int64 }
