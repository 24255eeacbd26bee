package link

import (
	"fmt"
	"slices"
	"sync"
	"unsafe"
)

// Heap is memory that guests can map: it backs a slab.Pool. Ranges that are small are
// cut from segments of one size class, large ones are a segment each.
type Heap struct {
	limit int64 // bytes of segments

	mu       sync.Mutex // guards all below
	bytes    int64      // of segments
	last     uint32
	segments map[uint32]*segment
	places   []*segment         // ascending by address
	open     map[int][]*segment // with a free piece, by size class
	conns    map[*Conn]struct{}
}

// segment is one memfd, mapped as long as anything of it is in use.
type segment struct {
	number uint32
	fd     int
	mem    []byte
	class  int   // bytes of a piece
	free   []int // offsets of pieces
	used   int   // pieces
}

// NewHeap returns an empty heap of at most limit bytes, which counts whole segments: pieces
// that are kept may leave much of them unused. Its memory goes with the last piece.
func NewHeap(limit int64) *Heap {
	return &Heap{limit: limit, segments: make(map[uint32]*segment), open: make(map[int][]*segment), conns: make(map[*Conn]struct{})}
}

// Alloc implements slab.Backing: it hands over n bytes, preallocated, so that a full
// file system for shared memory is an error here and no signal later.
func (h *Heap) Alloc(n int) ([]byte, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.open[n]) == 0 {
		if err := h.grow(n); err != nil {
			return nil, err
		}
	}
	s := h.open[n][len(h.open[n])-1]
	off := s.free[len(s.free)-1]
	s.free = s.free[:len(s.free)-1]
	s.used++
	if len(s.free) == 0 {
		h.open[n] = h.open[n][:len(h.open[n])-1]
	}
	return s.mem[off : off+n : off+n], nil
}

// grow adds a segment for pieces of n bytes; mu is held.
func (h *Heap) grow(n int) error {
	size := n
	if n <= segmentBytes/2 {
		size = segmentBytes
	}
	if int64(size) > h.limit-h.bytes {
		return fmt.Errorf("link: %d bytes more of shared memory; %d of %d are in use, some of them for a part only", size, h.bytes, h.limit)
	}
	fd, mem, err := mapNew(size)
	if err != nil {
		return fmt.Errorf("link: %d bytes of shared memory: %w", size, err)
	}
	h.bytes += int64(size)
	h.last++
	s := &segment{number: h.last, fd: fd, mem: mem, class: n}
	for off := size/n*n - n; off >= 0; off -= n {
		s.free = append(s.free, off)
	}
	h.segments[s.number] = s
	h.places = slices.Insert(h.places, h.place(s.base()), s)
	h.open[n] = append(h.open[n], s)
	return nil
}

// Free implements slab.Backing: mem is handed over. A segment without pieces in use is
// unmapped.
func (h *Heap) Free(mem []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := h.find(mem)
	if s == nil || len(mem) != s.class {
		panic("link: freed memory that is not the heap's")
	}
	if s.used--; s.used > 0 {
		if len(s.free) == 0 {
			h.open[s.class] = append(h.open[s.class], s)
		}
		s.free = append(s.free, int(address(mem)-s.base()))
		return
	}
	h.open[s.class] = slices.DeleteFunc(h.open[s.class], func(o *segment) bool { return o == s })
	if len(h.open[s.class]) == 0 {
		delete(h.open, s.class)
	}
	delete(h.segments, s.number)
	h.bytes -= int64(len(s.mem))
	at := h.place(s.base())
	h.places = slices.Delete(h.places, at, at+1)
	unmap(s.fd, s.mem)
	for c := range h.conns {
		c.enqueue(&Forget{Head{ID: uint64(s.number)}})
	}
}

// RangeOf borrows data, a part of one piece, and says where that lies; it reports whether
// it does.
func (h *Heap) RangeOf(data []byte) (Range, bool) {
	if len(data) == 0 {
		return Range{}, true
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	s := h.find(data)
	if s == nil {
		return Range{}, false
	}
	return Range{s.number, uint64(address(data) - s.base()), uint64(len(data))}, true
}

// piece returns all of the piece that r begins in.
func (h *Heap) piece(r Range) (whole Range, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := h.segments[r.Memory]
	if s == nil || r.Off >= uint64(len(s.mem)) {
		return Range{}, false
	}
	class := uint64(s.class)
	return Range{r.Memory, r.Off / class * class, class}, true
}

// find returns the segment that data lies in, nil if it does not; mu is held.
func (h *Heap) find(data []byte) *segment {
	if len(data) == 0 {
		return nil
	}
	at := h.place(address(data) + 1)
	if at == 0 {
		return nil
	}
	s := h.places[at-1]
	if off := address(data) - s.base(); off > uintptr(len(s.mem)) || uintptr(len(data)) > uintptr(len(s.mem))-off {
		return nil
	}
	return s
}

// place returns how many segments begin below an address; mu is held.
func (h *Heap) place(base uintptr) int {
	at, _ := slices.BinarySearchFunc(h.places, base, func(s *segment, base uintptr) int {
		if s.base() < base {
			return -1
		}
		return 1
	})
	return at
}

func (s *segment) base() uintptr { return address(s.mem) }

func address(mem []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(mem))) }

// attach and detach keep the list of whom Free tells.
func (h *Heap) attach(c *Conn) { h.mu.Lock(); defer h.mu.Unlock(); h.conns[c] = struct{}{} }
func (h *Heap) detach(c *Conn) { h.mu.Lock(); defer h.mu.Unlock(); delete(h.conns, c) }

// descriptor returns what a guest needs to map a memory. It stays the heap's, and
// open as long as a piece of the memory is in use.
func (h *Heap) descriptor(number uint32) (fd, size int, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := h.segments[number]
	if s == nil {
		return 0, 0, false
	}
	return s.fd, len(s.mem), true
}
