package enginetest_test

import (
	"bytes"
	"errors"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/blocks"
	"github.com/tensorferry/tensorferry/engine/enginetest"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/tensor"
)

// memfd is memory that another process could map: a file without a name for each
// block.
type memfd struct {
	mu    sync.Mutex
	files map[*byte]int // by first byte; guarded by mu
}

func (m *memfd) Alloc(n int) ([]byte, error) {
	fd, err := unix.MemfdCreate("block", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	if err := unix.Ftruncate(fd, int64(n)); err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	mem, err := unix.Mmap(fd, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.files[&mem[0]] = fd
	return mem, nil
}

func (m *memfd) Free(mem []byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	fd := m.files[&mem[0]]
	delete(m.files, &mem[0])
	if err := errors.Join(unix.Munmap(mem), unix.Close(fd)); err != nil {
		panic(err)
	}
}

// file is the file of a block of memory.
func (m *memfd) file(mem []byte) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.files[&mem[0]]
}

func TestModelsRunInMemoryOfAnotherKind(t *testing.T) {
	testkit.Start(t)
	m := &memfd{files: make(map[*byte]int)}
	l := newLate(1<<20, m, 1, 2)
	l.pool = slab.NewPool(0, m) // keeps nothing
	l.Engine = blocks.New(blocks.Config{Name: "late:0", Device: l, Pool: l.pool, Budget: l.budget})
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			enginetest.Run(t, enginetest.Case{
				New: func(testing.TB, int64) enginetest.Subject {
					made, err := l.Model(c.made(7))
					require.NoError(t, err)
					return enginetest.Subject{Model: made, Idle: func() error { l.idle(t); return nil }}
				},
				Inputs: c.in, Want: c.want,
			})
		})
	}
	l.Close()
	if len(m.files) != 0 {
		t.Errorf("%d files are still open", len(m.files))
	}
}

func TestABlockIsFilledThroughItsFile(t *testing.T) {
	testkit.Start(t)
	m := &memfd{files: make(map[*byte]int)}
	l := newLate(1<<20, m, 1, 1)
	defer l.Close()
	l.pool = slab.NewPool(0, m)
	l.Engine = blocks.New(blocks.Config{Name: "late:0", Device: l, Pool: l.pool, Budget: l.budget})
	made, err := l.Model(plusOne(blocks.Own)(3))
	require.NoError(t, err)
	in := []tensor.Tensor{matrix(3, 9)}
	r, err := made.Open(t.Context(), enginetest.Call(made, in, nil, 27))
	require.NoError(t, err)
	b, err := r.Borrow(t.Context())
	require.NoError(t, err)
	if _, err := unix.Pwrite(m.file(b.In[0]), in[0].Data, 0); err != nil { // as another process would
		t.Fatal(err)
	}
	r.Filled(b)
	var o engine.Out
	if o, err = r.Next(t.Context()); err != nil {
		t.Fatal(err)
	}
	want, err := plusOneOf(in)
	require.NoError(t, err)
	got := make([]byte, 27)
	if _, err := unix.Pread(m.file(o.Data), got, 0); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want[0].Data) {
		t.Errorf("the file of the result has %v, want %v", got, want[0].Data)
	}
	o.Release()
	if err := r.Close(); err != nil {
		t.Error(err)
	}
}
