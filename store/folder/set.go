package folder

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/shelf"
	"github.com/tensorferry/tensorferry/store"
)

// Ready implements Sets: it completes the file, waits for the disk and closes the file.
func (f *Store) Ready(ctx context.Context, w store.Writer) (store.Info, error) {
	set, err := shelf.Members[*writer](ctx, f, []store.Writer{w})
	if err == nil {
		err = set[0].seal()
	}
	if err != nil {
		return store.Info{}, err
	}
	return set[0].pushed.info.Clone(), nil
}

// CommitAll implements Sets. The set is committed when its manifest is in the folder: then
// the index has all of its tensors, and their files get their names. If that fails, the
// store tries again before its next change, and Open does.
func (f *Store) CommitAll(ctx context.Context, writers []store.Writer) ([]store.Info, error) {
	defer shelf.AbortAll(writers)
	set, err := shelf.Members[*writer](ctx, f, writers)
	if err != nil || len(set) == 0 {
		return nil, err
	}
	for _, w := range set { // unless Ready has
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if err := w.seal(); err != nil {
			return nil, err
		}
	}
	f.sets.Lock()
	defer f.sets.Unlock()
	if err := f.finish(); err != nil {
		return nil, err
	}
	if err := f.checkUsable(); err != nil {
		return nil, err
	}
	m := &manifest{}
	for _, w := range set {
		m.moves = append(m.moves, move{w.temp, w.pushed.file, w.pushed})
	}
	if err := m.write(f); err != nil {
		return nil, fmt.Errorf("%w, with %d others", set[0].wrap("commit", err), len(set)-1)
	}
	syncErr := f.syncNames(f.dir)
	m.durable, f.unfinished = syncErr == nil, m
	f.stuck.Store(syncErr != nil)
	made, infos := make([]*pushed, len(set)), make([]store.Info, len(set))
	for i, w := range set {
		w.pushed.file = w.temp // until move; no reader has it yet
		made[i], infos[i], w.pushed = w.pushed, w.pushed.info.Clone(), nil
	}
	f.changes.Lock()
	f.publish(made...)
	f.changes.Unlock()
	if syncErr != nil {
		return infos, fmt.Errorf("store: a set of %d tensors is stored, but may not survive a power failure: %w", len(set), syncErr)
	}
	if err := f.finish(); err != nil {
		f.config.Log.Warn("files of a committed set have no names yet; will try again", slog.Int("files", len(m.moves)), slog.Any("error", err))
	}
	return infos, nil
}

// manifest is a committed set whose files may not all have their names.
type manifest struct {
	moves   []move // that remain
	durable bool   // the manifest's own name is
}

// move gives a file of a set its name.
type move struct {
	temp, file string
	pushed     *pushed // nil after a restart
}

// text returns what the manifest's file holds: a line for each file, and a digest.
func (m *manifest) text() []byte {
	text := []byte("tensorferry set 1\n")
	for _, m := range m.moves {
		text = fmt.Appendf(text, "%s %s\n", m.temp, m.file)
	}
	var d codec.Digester
	_, _ = d.Write(text) // it never fails
	return fmt.Appendln(text, d.Sum())
}

func parseManifest(text []byte) (*manifest, error) {
	m := &manifest{}
	_, lines, _ := strings.Cut(string(text), "\n")
	for line := range strings.Lines(lines) {
		temp, file, ok := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		if !ok {
			break // the digest
		}
		if !isTemp(temp) || !isPushedName(file) || len(m.moves) == store.MaxSet {
			return nil, fmt.Errorf("%.200q is not a file of a set", line)
		}
		m.moves = append(m.moves, move{temp: temp, file: file})
	}
	if !bytes.Equal(text, m.text()) {
		return nil, errors.New("its digest is wrong")
	}
	return m, nil
}

// write commits the set in the folder, if the folder is synced after it.
func (m *manifest) write(f *Store) error {
	temp := filepath.Join(f.dir, newTemp())
	file, err := f.create(temp)
	if err != nil {
		return err
	}
	err = f.write(file, 0, [][]byte{m.text()})
	if err == nil {
		err = f.sync(file)
	}
	if err = errors.Join(err, file.Close()); err == nil {
		err = f.syncNames(f.dir) // a manifest may not outlive the names in it
	}
	if err == nil {
		err = f.rename(temp, filepath.Join(f.dir, manifestFile))
	}
	if err != nil {
		_ = f.remove(temp) // if this fails, the next Open removes it
	}
	return err
}

// readManifest reads the set that an earlier store has not finished, if there is one.
func (f *Store) readManifest() error {
	file, err := os.Open(filepath.Join(f.dir, manifestFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("store: %w", err)
	}
	defer file.Close()
	text, err := io.ReadAll(io.LimitReader(file, store.MaxSet*128))
	if err != nil {
		return fmt.Errorf("store: %w", err)
	}
	if f.unfinished, err = parseManifest(text); err != nil {
		return fmt.Errorf("store: %s names the files of a set that was committed, but is damaged: %w; restore it, or remove it and lose the %s*%s files of the set",
			file.Name(), err, tempPrefix, tempSuffix)
	}
	return nil
}

// finish gives the files of a committed set their names, and removes its manifest. The
// caller holds sets.
func (f *Store) finish() (err error) {
	u := f.unfinished
	if u == nil {
		return nil
	}
	defer func() { f.stuck.Store(err != nil) }()
	if err := f.checkFolder(); err != nil {
		return err
	}
	if !u.durable {
		err = f.syncNames(f.dir)
		u.durable = err == nil
	}
	for err == nil && len(u.moves) > 0 {
		m := u.moves[0]
		unlock := f.lockName(m.file) // one at a time, so that others get through
		if err = f.move(m); err == nil {
			u.moves = u.moves[1:]
		}
		unlock()
	}
	if err == nil {
		err = f.syncNames(f.dir)
	}
	if err == nil {
		err = f.remove(filepath.Join(f.dir, manifestFile))
		if errors.Is(err, fs.ErrNotExist) { // another program has removed it
			err = nil
		}
	}
	if err != nil {
		return changeError("finish the set in "+manifestFile, err)
	}
	f.unfinished = nil
	return nil
}

// move renames a file of a set, unless that is done. A missing one was renamed before a
// crash, or another program has deleted it. The caller holds the name's lock.
func (f *Store) move(m move) error {
	if m.pushed != nil && m.pushed.file == m.file {
		return nil
	}
	err := f.rename(filepath.Join(f.dir, m.temp), filepath.Join(f.dir, m.file))
	if err == nil && m.pushed != nil {
		m.pushed.file = m.file
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// change begins a change of a name, until unlock is called. If a set could not be finished, it
// is now; if one is being finished, the name's file gets its name first, so that the set does
// not undo the change.
func (f *Store) change(name, file string) (unlock func(), err error) {
	f.changes.RLock()
	for f.stuck.Load() {
		f.changes.RUnlock()
		f.sets.Lock()
		err := f.finish()
		f.sets.Unlock()
		if err != nil {
			return nil, err
		}
		f.changes.RLock()
	}
	unlockName := f.lockName(file)
	unlock = func() { unlockName(); f.changes.RUnlock() }
	err = f.checkUsable()
	if p, known := f.index.Find(name); err == nil && known {
		if err = f.move(move{p.file, file, p}); err != nil {
			err = changeError("finish the set in "+manifestFile, err)
		}
	}
	if err != nil {
		unlock()
		return nil, err
	}
	return unlock, nil
}

func newTemp() string { return tempPrefix + rand.Text() + tempSuffix }

// isTemp reports whether file is what newTemp may return.
func isTemp(file string) bool {
	digits, ok := strings.CutPrefix(file, tempPrefix)
	digits, ok2 := strings.CutSuffix(digits, tempSuffix)
	return ok && ok2 && digits != "" && strings.Trim(digits, "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567") == ""
}
