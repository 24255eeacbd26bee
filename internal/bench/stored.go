package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
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

// weights is what the store calls the one tensor of the file that somebody put into
// its folder.
const weights = "weights/x"

// disk is a temporary folder with a store in it, and room for copies beside that.
// It belongs to one goroutine.
type disk struct {
	dir   string
	mem   Memory // of what moves through the store
	store *store.Folder
	file  *tensorfile.Safetensors // Source as weights, mapped by a client
	input tensor.Tensor           // of file
	made  int                     // files and tensors so far: each has another name
}

// newDisk writes the source to a file of one tensor and opens a store on the file's
// folder. The file's pages stay in memory.
func newDisk(mem Memory) (_ *disk, err error) {
	d := &disk{mem: mem}
	if d.dir, err = os.MkdirTemp("", "tensorferry-bench-"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.Close())
		}
	}()
	folder := filepath.Join(d.dir, "store")
	if err = os.Mkdir(folder, 0o755); err != nil {
		return nil, err
	}
	err = d.create(d.weights(), func(f *os.File) error {
		// What the disk still has to do would be in somebody's time.
		return errors.Join(tensorfile.WriteSafetensors(f, []tensorfile.Named{{Name: "x", Tensor: floats(mem.Source)}}, nil), f.Sync())
	})
	if err != nil {
		return nil, err
	}
	if d.file, err = tensorfile.OpenSafetensors(d.weights()); err != nil {
		return nil, err
	}
	if d.input, err = d.file.Tensor("x"); err != nil {
		return nil, err
	}
	d.store, err = store.OpenFolder(folder, store.FolderConfig{})
	return d, err
}

func (d *disk) weights() string { return filepath.Join(d.dir, "store", "weights.safetensors") }

// name is new every time.
func (d *disk) name() string {
	d.made++
	return strconv.Itoa(d.made)
}

func (*disk) create(path string, fill func(*os.File) error) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	return errors.Join(fill(f), f.Close())
}

// toFile times what fills a new file beside the store with the source, at its end,
// and compares it. It waits until the disk has taken note that the file is removed:
// that would be in the next one's time.
func (d *disk) toFile(fill func(*os.File) error) (Sample, error) {
	path := filepath.Join(d.dir, d.name())
	s, err := timed(func() error { return d.create(path, fill) })
	if err == nil {
		err = checkFile(path, d.mem.Source)
	}
	err = errors.Join(err, os.Remove(path))
	if err == nil {
		var dir *os.File
		if dir, err = os.Open(d.dir); err == nil {
			err = errors.Join(dir.Sync(), dir.Close())
		}
	}
	return s.unless(err)
}

// copied is a push's peer: it copies the weights to a new file, a piece at a time,
// and waits for the disk. To ask the system for a copy would be no faster where it
// makes one, and no peer where it lets two files share their bytes.
func (d *disk) copied(context.Context) (Sample, error) {
	return d.toFile(func(f *os.File) error {
		src, err := os.Open(d.weights())
		if err != nil {
			return err
		}
		defer src.Close()
		_, err = io.CopyBuffer(struct{ io.Writer }{f}, struct{ io.Reader }{src}, make([]byte, copyBytes))
		return errors.Join(err, f.Sync())
	})
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

// checkFile returns an error if a file does not end with the source.
func checkFile(path string, source []byte) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.Seek(-int64(len(source)), io.SeekEnd); err != nil {
		return err
	}
	piece := make([]byte, min(ChunkBytes, len(source)))
	for at := 0; at < len(source); at += len(piece) {
		piece = piece[:min(len(piece), len(source)-at)]
		if _, err := io.ReadFull(f, piece); err != nil {
			return err
		}
		if !bytes.Equal(piece, source[at:at+len(piece)]) {
			return fmt.Errorf("bench: chunk %d at rest is not the one that was sent", at/ChunkBytes)
		}
	}
	return nil
}

// keeper is a client of a server with a store. It belongs to one goroutine.
type keeper struct {
	*disk
	oursClient
}

// newKeeper starts goroutines that serve the store that keep makes until Close.
func newKeeper(ctx context.Context, network string, d *disk, keep func(*slab.Pool) store.Store) (*keeper, *Ends, error) {
	k := &keeper{disk: d}
	ends, err := ours(&k.oursClient, keep).Open(ctx, network, d.mem)
	return k, ends, err
}

// pull fetches the weights into Back, whose bytes are compared after the time.
func (k *keeper) pull(ctx context.Context) (Sample, error) { return k.fetched(ctx, weights) }

func (k *keeper) fetched(ctx context.Context, name string) (Sample, error) {
	e := End{Source: k.mem.Source, To: k.mem.Back}
	s, err := e.move(Echo, func() error { return k.fetch(ctx, name, client.Into(k.mem.Back)) })
	return s.unless(err)
}

func (k *keeper) fetch(ctx context.Context, name string, to client.Sink) error {
	_, err := k.client.Pull(ctx, client.PullRequest{
		Select: []client.Selection{{Name: name}},
		To:     func(string, tensor.Desc) (client.Sink, error) { return to, nil },
	})
	return err
}

// pullToFile fetches the weights into a new file, and compares it after the time.
func (k *keeper) pullToFile(ctx context.Context) (Sample, error) {
	return k.toFile(func(f *os.File) error { return k.fetch(ctx, weights, client.At(f)) })
}

// push stores the weights under a new name, fetches and compares them after the time,
// and deletes them.
func (k *keeper) push(ctx context.Context) (Sample, error) {
	in := client.From("", k.input)
	in.Name = "pushed/" + k.name()
	s, err := timed(func() error {
		_, err := k.client.Push(ctx, client.PushRequest{Tensors: []client.Input{in}})
		return err
	})
	if err == nil {
		_, err = k.fetched(ctx, in.Name)
		_, e := k.client.Delete(ctx, in.Name)
		err = errors.Join(err, e)
	}
	return s.unless(err)
}

// stored measures pushes and pulls.
func (c Config) stored(ctx context.Context, r *Report, network string, m Memory) (err error) {
	var open []func() error
	defer func() {
		for _, end := range slices.Backward(open) {
			err = errors.Join(err, end())
		}
	}()
	d, err := newDisk(m)
	if err != nil {
		return err
	}
	open = append(open, d.Close)
	raw, err := RawCRC.Open(ctx, network, m)
	if err != nil {
		return err
	}
	open = append(open, func() error { _ = raw.Close(); return nil }) // whatever a cut connection gave the server
	folder, ends, err := newKeeper(ctx, network, d, func(*slab.Pool) store.Store { return d.store })
	if err != nil {
		return err
	}
	open = append(open, ends.Close)
	var kept *store.Memory
	memory, ends, err := newKeeper(ctx, network, d, func(p *slab.Pool) store.Store {
		kept = store.NewMemory(p, slab.SizeOf(int64(len(m.Source)))) // room for one
		return kept
	})
	if err != nil {
		return err
	}
	open = append(open, kept.Close, ends.Close)
	upload := Peer{Name: RawCRC.Name, Do: func(ctx context.Context) (Sample, error) { return raw.Move(ctx, Upload) }}
	for _, w := range []struct {
		work   string
		ours   func(context.Context) (Sample, error)
		theirs Peer
	}{
		{pull, folder.pull, upload},
		{pullToFile, folder.pullToFile, upload},
		{push, folder.push, Peer{Name: "cp", Do: d.copied}},
		{pushToMemory, memory.push, upload},
	} {
		if err := c.compare(ctx, r, network, w.work, len(m.Source), w.ours, w.theirs); err != nil {
			return err
		}
	}
	return nil
}
