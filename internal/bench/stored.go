package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// The works on a server's store.
const (
	pull         = "pull"           // from a mapped file into memory
	pullToFile   = "pull-to-file"   // from a mapped file into a new file
	push         = "push"           // of a mapped file into a folder, durably
	pushToMemory = "push-to-memory" // of the same into a store in memory
)

// weights is the whole file that somebody put into the server's folder, and what
// its one tensor is called in it and by the store.
const (
	weightsFile = "weights.safetensors"
	weightsName = "x"
	weights     = "weights/" + weightsName
)

// disk is a temporary folder with a server's store in it, and room for copies
// beside that, on one file system. It belongs to one goroutine.
type disk struct {
	dir    string
	store  *store.Folder
	file   *tensorfile.Safetensors // the weights, mapped by a client
	tensor tensor.Tensor           // of file
	files  int                     // made so far: each has another name
}

// newDisk writes source, which it borrows, to a file of one tensor and opens a
// store on the file's folder. The file's pages stay in memory.
func newDisk(source []byte) (_ *disk, err error) {
	d := &disk{}
	if d.dir, err = os.MkdirTemp("", "tensorferry-bench-"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.Close())
		}
	}()
	if d.tensor, err = floats(source); err != nil {
		return nil, err
	}
	if err = os.Mkdir(d.folder(), 0o755); err != nil {
		return nil, err
	}
	f, err := os.Create(d.weights())
	if err != nil {
		return nil, err
	}
	err = tensorfile.WriteSafetensors(f, []tensorfile.Named{{Name: weightsName, Tensor: d.tensor}}, nil)
	if err == nil {
		err = f.Sync() // what the disk still has to do would be in somebody's time
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	if d.file, err = tensorfile.OpenSafetensors(d.weights()); err != nil {
		return nil, err
	}
	if d.tensor, err = d.file.Tensor(weightsName); err != nil {
		return nil, err
	}
	d.store, err = store.OpenFolder(d.folder(), store.FolderConfig{})
	return d, err
}

func (d *disk) folder() string  { return filepath.Join(d.dir, "store") }
func (d *disk) weights() string { return filepath.Join(d.folder(), weightsFile) }

// fresh returns the path of a file beside the store that is not there.
func (d *disk) fresh() string {
	d.files++
	return filepath.Join(d.dir, strconv.Itoa(d.files))
}

// remove removes a file, and waits until the disk has taken note: what it does for
// that would be in the next one's time.
func (d *disk) remove(path string) error {
	if err := os.Remove(path); err != nil {
		return err
	}
	f, err := os.Open(d.dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// copied is a push's peer: it copies the weights to a new file as cp does, and
// waits for the disk.
func (d *disk) copied(ctx context.Context) (_ Sample, err error) {
	path := d.fresh()
	s, err := timed(func() error { return copyFile(ctx, path, d.weights()) })
	if err == nil {
		err = checkFile(path, d.tensor.Data)
	}
	if err = errors.Join(err, d.remove(path)); err != nil {
		return Sample{}, err
	}
	return s, nil
}

// Close removes everything.
func (d *disk) Close() error {
	var err error
	if d.store != nil {
		err = d.store.Close()
	}
	if d.file != nil {
		err = errors.Join(err, d.file.Close())
	}
	return errors.Join(err, os.RemoveAll(d.dir))
}

// copyFile reads and writes every byte, a piece at a time, and makes them durable.
// To ask the system for a copy would be no faster where it makes one, and no peer
// where it lets two files share their bytes.
func copyFile(ctx context.Context, to, from string) error {
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := os.Create(to)
	if err != nil {
		return err
	}
	piece := make([]byte, copyBytes)
	for err == nil {
		var n int
		if n, err = src.Read(piece); err == nil {
			_, err = dst.Write(piece[:n])
		}
		if err == nil {
			err = ctx.Err()
		}
	}
	if errors.Is(err, io.EOF) {
		err = dst.Sync()
	}
	return errors.Join(err, dst.Close())
}

// checkFile returns an error if a file does not end with the source, which it
// borrows.
func checkFile(path string, source []byte) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	begin := st.Size() - int64(len(source))
	piece := make([]byte, ChunkBytes)
	return checkPieces(source, func(off, n int) ([]byte, error) {
		_, err := f.ReadAt(piece[:n], begin+int64(off))
		return piece[:n], err
	})
}

// checkStored returns an error if a store's tensor is not the source, which it
// borrows.
func checkStored(ctx context.Context, st store.Store, name string, source []byte) error {
	r, err := st.Open(ctx, name)
	if err != nil {
		return err
	}
	defer r.Release()
	if n, err := r.Info().Bytes(); err != nil || n != int64(len(source)) {
		return errors.Join(err, fmt.Errorf("bench: %d bytes are stored, %d were sent", n, len(source)))
	}
	var piece []byte
	return checkPieces(source, func(off, n int) ([]byte, error) {
		data, held, err := r.View(ctx, int64(off), int64(n))
		if err != nil {
			return nil, err
		}
		defer held.Release()
		piece = append(piece[:0], data...)
		return piece, nil
	})
}

// checkPieces compares the source, which it borrows, with what read gives of as
// many bytes.
func checkPieces(source []byte, read func(off, n int) ([]byte, error)) error {
	for i := range chunks(source) {
		want := chunk(source, i)
		got, err := read(i*ChunkBytes, len(want))
		if err != nil {
			return err
		}
		if !bytes.Equal(got, want) {
			return fmt.Errorf("bench: chunk %d at rest is not the one that was sent", i)
		}
	}
	return nil
}

// keeper is a server with a store, in this process, and a client of it. It belongs
// to one goroutine.
type keeper struct {
	server  *oursServer
	client  *client.Client
	store   store.Store
	release func()
	pushed  int // tensors so far: each has another name
}

// newKeeper starts goroutines that serve st until Close. With nil it serves, and
// owns, a store in memory with room for one tensor of size bytes.
func newKeeper(network string, st store.Store, size int) (_ *keeper, err error) {
	l, release, err := listen(network)
	if err != nil {
		return nil, err
	}
	k := &keeper{store: st, release: release}
	k.server, err = serveOurs(l, size, func(pool *slab.Pool) store.Store {
		if k.store == nil {
			k.store = store.NewMemory(pool, slab.SizeOf(int64(size)))
		}
		return k.store
	})
	if err != nil {
		release()
		return nil, err
	}
	if k.client, err = dial(network, l.Addr().String()); err != nil {
		err = errors.Join(err, k.server.Close())
		release()
		return nil, err
	}
	return k, nil
}

// Pull fetches the weights into m.Back, whose bytes are compared after the time.
func (k *keeper) Pull(ctx context.Context, m Memory) (Sample, error) {
	idle := make(chan struct{})
	close(idle)
	return m.measured(Echo, func() error { return k.pull(ctx, client.Into(m.Back)) }, idle, m.Back)
}

// PullToFile fetches the weights into a new file, and compares it after the time
// with source, which it borrows.
func (k *keeper) PullToFile(ctx context.Context, d *disk, source []byte) (_ Sample, err error) {
	path := d.fresh()
	s, err := timed(func() error {
		f, err := os.Create(path)
		if err != nil {
			return err
		}
		return errors.Join(k.pull(ctx, client.At(f)), f.Close())
	})
	if err == nil {
		err = checkFile(path, source)
	}
	if err = errors.Join(err, d.remove(path)); err != nil {
		return Sample{}, err
	}
	return s, nil
}

func (k *keeper) pull(ctx context.Context, to client.Sink) error {
	_, err := k.client.Pull(ctx, client.PullRequest{
		Select: []client.Selection{{Name: weights}},
		To:     func(string, tensor.Desc) (client.Sink, error) { return to, nil },
	})
	return err
}

// Push stores t under a new name, compares it after the time with source, which
// it borrows, and deletes it.
func (k *keeper) Push(ctx context.Context, t tensor.Tensor, source []byte) (_ Sample, err error) {
	k.pushed++
	in := client.From("", t)
	in.Name = "pushed/" + strconv.Itoa(k.pushed)
	s, err := timed(func() error {
		_, err := k.client.Push(ctx, client.PushRequest{Tensors: []client.Input{in}})
		return err
	})
	if err != nil {
		return Sample{}, err
	}
	err = checkStored(ctx, k.store, in.Name, source)
	if _, e := k.store.Delete(ctx, in.Name); err != nil || e != nil {
		return Sample{}, errors.Join(err, e)
	}
	return s, nil
}

// Close ends the client, the server and every goroutine behind them.
func (k *keeper) Close() error {
	err := errors.Join(k.client.Close(), k.server.Close())
	k.release()
	return err
}

// stored measures pushes and pulls.
func (c Config) stored(ctx context.Context, r *Report, network string, m Memory) (err error) {
	d, err := newDisk(m.Source)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	raw, err := RawCRC.Open(ctx, network, m)
	if err != nil {
		return err
	}
	defer func() { _ = raw.Close() }() // whatever a cut connection gave the server
	folder, err := newKeeper(network, d.store, len(m.Source))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, folder.Close()) }()
	memory, err := newKeeper(network, nil, len(m.Source))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, memory.Close(), memory.store.Close()) }()

	upload := func(ctx context.Context) (Sample, error) { return raw.Move(ctx, Upload) }
	for _, w := range []struct {
		work, peer   string
		ours, theirs func(context.Context) (Sample, error)
	}{
		{pull, RawCRC.Name, func(ctx context.Context) (Sample, error) { return folder.Pull(ctx, m) }, upload},
		{pullToFile, RawCRC.Name, func(ctx context.Context) (Sample, error) { return folder.PullToFile(ctx, d, m.Source) }, upload},
		{push, "cp", func(ctx context.Context) (Sample, error) { return folder.Push(ctx, d.tensor, m.Source) }, d.copied},
		{pushToMemory, RawCRC.Name, func(ctx context.Context) (Sample, error) { return memory.Push(ctx, d.tensor, m.Source) }, upload},
	} {
		x := &Comparison{Net: network, Work: w.work, Peer: w.peer, Bytes: len(m.Source), ours: w.ours, theirs: w.theirs}
		if err := c.compare(ctx, r, x); err != nil {
			return err
		}
	}
	return nil
}
