//go:build linux

package roads

import (
	"math/rand/v2"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// way carries packets from one TUN device to the other. One goroutine on a thread of its
// own reads, waits and writes: a goroutine that sleeps would be a millisecond late.
type way struct {
	from, to int // of the Ends, which close them
	mtu      int
	random   *rand.Rand
	set      Way
	stop     [2]*os.File // of a pipe
	counters

	begin        time.Time
	free         time.Duration // when the line has sent what it has, since begin
	line         queue
	large, small buffers // of an MTU, and of smallBytes
}

// packet is on its way.
type packet struct {
	data []byte
	due  time.Duration // since begin
}

func newWay(from, to int, l Link, which uint64) (*way, error) {
	w := &way{from: from, to: to, mtu: l.MTU, set: l.Way, random: rand.New(rand.NewPCG(l.Seed, which)), begin: time.Now()}
	var err error
	w.stop[0], w.stop[1], err = os.Pipe()
	if err != nil {
		return nil, err
	}
	return w, nil
}

// end has run return.
func (w *way) end() { _ = w.stop[1].Close() }

// release is called after run.
func (w *way) release() { _ = w.stop[0].Close() }

// run carries packets until end.
func (w *way) run() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	wait := []unix.PollFd{{Fd: int32(w.from), Events: unix.POLLIN}, {Fd: int32(descriptor(w.stop[0])), Events: unix.POLLIN}}
	for {
		var timeout *unix.Timespec
		if !w.line.empty() {
			t := unix.NsecToTimespec(max(0, w.line.head().due-w.now()).Nanoseconds())
			timeout = &t
		}
		wait[0].Revents, wait[1].Revents = 0, 0
		if _, err := unix.Ppoll(wait, timeout, nil); err != nil && err != unix.EINTR {
			return // only for bad arguments
		}
		if wait[1].Revents != 0 {
			return
		}
		if wait[0].Revents != 0 {
			w.read()
		}
		w.deliver()
	}
}

func (w *way) now() time.Duration { return time.Since(w.begin) }

// read takes what the device has, or a part.
func (w *way) read() {
	for range passPackets {
		buf := w.large.get(w.mtu)
		n, err := unix.Read(w.from, buf)
		if err != nil || n <= 0 {
			w.large.put(buf)
			return // EAGAIN
		}
		data := buf[:n]
		if n <= smallBytes {
			data = w.small.get(smallBytes)[:n]
			copy(data, buf)
			w.large.put(buf)
		}
		if !w.accept(data) {
			w.recycle(data)
		}
	}
}

// recycle keeps the buffer of a packet that has gone.
func (w *way) recycle(data []byte) {
	if cap(data) > smallBytes {
		w.large.put(data)
	} else {
		w.small.put(data)
	}
}

// buffers are those of one size that nobody uses: garbage would be collected, and that stops
// what is urgent.
type buffers [][]byte

func (b *buffers) get(size int) []byte {
	all := *b
	if len(all) == 0 {
		return make([]byte, size)
	}
	last := all[len(all)-1]
	*b = all[:len(all)-1]
	return last[:size]
}

func (b *buffers) put(buf []byte) { *b = append(*b, buf) }

// accept has a packet wait for the line and travel, unless it gets lost.
func (w *way) accept(data []byte) bool {
	if data[0]>>4 != 4 {
		return false // the kernel asks for IPv6 routers
	}
	now := w.now()
	start := max(w.free, now)
	if w.set.inTime(start-now)+int64(len(data)) > w.set.queue(w.mtu) {
		w.dropped.Add(1)
		return false
	}
	w.free = start + w.set.needs(len(data))
	if w.set.Loss > 0 && w.random.Float64() < w.set.Loss {
		w.lost.Add(1) // on the line, which it took its time of
		return false
	}
	w.line.push(packet{data, w.free + w.set.Delay})
	return true
}

// deliver writes what is due.
func (w *way) deliver() {
	now := w.now()
	for !w.line.empty() && w.line.head().due <= now {
		p := w.line.pop()
		if _, err := unix.Write(w.to, p.data); err != nil {
			w.dropped.Add(1) // the device is down
		} else {
			w.packets.Add(1)
			w.bytes.Add(int64(len(p.data)))
		}
		if late := int64(w.now() - p.due); late > w.late.Load() {
			w.late.Store(late)
		}
		w.recycle(p.data)
	}
}

// queue is first in, first out. The zero value is empty.
type queue struct {
	ring        []packet
	first, size int
}

func (q *queue) empty() bool { return q.size == 0 }

func (q *queue) head() *packet { return &q.ring[q.first] }

func (q *queue) push(p packet) {
	if q.size == len(q.ring) {
		grown := make([]packet, max(64, 2*q.size))
		n := copy(grown, q.ring[q.first:])
		copy(grown[n:], q.ring[:q.first])
		q.ring, q.first = grown, 0
	}
	q.ring[(q.first+q.size)%len(q.ring)] = p
	q.size++
}

func (q *queue) pop() packet {
	p := q.ring[q.first]
	q.ring[q.first] = packet{}
	q.first = (q.first + 1) % len(q.ring)
	q.size--
	return p
}
