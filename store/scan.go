package store

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/tensorferry/tensorferry/tensorfile"
)

// scan is what was last seen in the folder.
type scan struct {
	changed time.Time // the folder's own time then
	settled bool      // a later change would show in it
	files   map[string]*wholeFile
}

// wholeFile is a .safetensors file that somebody put into the folder.
type wholeFile struct {
	seen   fs.FileInfo
	mapped *mapped // nil when it cannot be used
}

func (w *wholeFile) usable() bool { return w != nil && w.mapped != nil }

// same reports whether a file is the one that was seen, not written to since.
func same(seen, now fs.FileInfo) bool {
	return os.SameFile(seen, now) && seen.Size() == now.Size() && seen.ModTime().Equal(now.ModTime())
}

// rescan looks for files that came, changed or went. Concurrent callers share a scan
// that began after they called. With always it scans even if the folder's own time has
// not changed: a file may have been written to.
func (f *Folder) rescan(always bool) error {
	before := f.scans.Load()
	f.scanning.Lock()
	defer f.scanning.Unlock()
	if f.scan.files == nil {
		return ErrClosed
	}
	if f.scans.Load() > before {
		return nil
	}
	if err := f.isHere(); err != nil {
		return err
	}
	info, err := os.Stat(f.dir)
	if err != nil {
		return fmt.Errorf("store: %w", err)
	}
	if !always && f.scan.settled && f.scan.changed.Equal(info.ModTime()) && !f.brokenOnesChanged() {
		return nil
	}
	f.scans.Add(1)
	settled := time.Since(info.ModTime()) > clockGrain
	err = f.look()
	f.scan.settled, f.scan.changed = settled && err == nil, info.ModTime()
	return err
}

// brokenOnesChanged reports whether an unusable file has changed: it may have been seen
// while it was copied, of which the folder's time shows only the beginning.
func (f *Folder) brokenOnesChanged() bool {
	for name, w := range f.scan.files {
		if w.usable() {
			continue
		}
		if now, err := os.Stat(filepath.Join(f.dir, name)); err != nil || !same(w.seen, now) {
			return true
		}
	}
	return false
}

// look reads the folder and the header of what is new in it.
func (f *Folder) look() error {
	names, err := f.strangers()
	if err != nil {
		return fmt.Errorf("store: %w", err)
	}
	there := map[string]bool{}
	var gone []*wholeFile
	changed := false
	for _, name := range names {
		old := f.scan.files[name]
		now, e := f.lookAt(name, old)
		if e != nil {
			err, now = fmt.Errorf("store: %w", e), old
		}
		if now == nil {
			continue
		}
		there[name] = true
		if now != old {
			f.scan.files[name] = now
			gone = append(gone, old)
			changed = changed || now.usable() || old.usable()
		}
	}
	for name, w := range f.scan.files {
		if !there[name] {
			delete(f.scan.files, name)
			gone = append(gone, w)
			changed = changed || w.usable()
		}
	}
	if changed {
		f.showParts()
	}
	for _, w := range gone { // now that nobody can come to know their tensors
		if w.usable() {
			w.mapped.Release()
		}
	}
	return err
}

// strangers returns the names of .safetensors files but the known pushed ones: there
// may be thousands of those, and each push causes a scan.
func (f *Folder) strangers() ([]string, error) {
	dir, err := os.Open(f.dir)
	if err != nil {
		return nil, err
	}
	names, err := dir.Readdirnames(-1)
	if err = errors.Join(err, dir.Close()); err != nil {
		return nil, err
	}
	var strange []string
	for some := range slices.Chunk(names, pageNames) {
		f.mu.Lock()
		for _, name := range some {
			if !f.files[name] && strings.HasSuffix(name, fileSuffix) && !strings.HasPrefix(name, ".") {
				strange = append(strange, name)
			}
		}
		f.mu.Unlock()
	}
	return strange, nil
}

// lookAt returns the file of this name, which is old if it has not changed; nil if there
// is none or it is a pushed tensor, which it adopts if it is new. An error says that
// this process cannot open files now.
func (f *Folder) lookAt(name string, old *wholeFile) (*wholeFile, error) {
	isPushed := isPushedName(name)
	if isPushed {
		lock := f.nameLock(name) // so not between the rename of a Commit and its end
		lock.Lock()
		defer lock.Unlock()
		f.mu.Lock()
		known := f.files[name]
		f.mu.Unlock()
		if known {
			return nil, nil
		}
	}
	path := filepath.Join(f.dir, name)
	seen, err := os.Stat(path) // through a link to a file elsewhere
	if err != nil || !seen.Mode().IsRegular() {
		return nil, nil
	}
	if old != nil && same(old.seen, seen) {
		return old, nil
	}
	st, err := tensorfile.OpenSafetensors(path)
	if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) {
		return nil, err
	}
	if err == nil && isPushed {
		var info Info
		if info, err = pushedInfo(name, st); err == nil {
			_ = st.Close() // unmapping what was mapped does not fail
			f.adopt(name, info, seen.Size())
			return nil, nil
		}
		if errors.Is(err, errForeign) {
			err = nil // a file like any other, in spite of its name
		} else {
			_ = st.Close()
		}
	}
	if err != nil {
		if old == nil || old.usable() { // once, however often it changes
			f.config.Log.Warn("file can not be used", slog.String("file", name), slog.Any("error", err))
		}
		return &wholeFile{seen: seen}, nil
	}
	w := &wholeFile{seen: seen, mapped: &mapped{file: st}}
	w.mapped.init(func() { _ = st.Close() })
	return w, nil
}

// adopt adds a pushed tensor that an earlier store left. The caller holds the name's
// lock.
func (f *Folder) adopt(file string, info Info, bytes int64) {
	p := &pushed{info: info, file: file}
	p.init(func() { f.used.Add(-bytes) })
	f.mu.Lock()
	defer f.mu.Unlock()
	f.used.Add(bytes)
	f.files[file] = true
	f.pushed.put(info.Name, p)
}

// showParts lists the tensors of all whole files anew.
func (f *Folder) showParts() {
	parts := map[string]part{}
	for file, w := range f.scan.files {
		if !w.usable() {
			continue
		}
		unusable := 0
		for _, name := range w.mapped.file.Names() {
			d, err := w.mapped.file.Desc(name)
			info := Info{
				Name: strings.TrimSuffix(file, fileSuffix) + "/" + name,
				Desc: d, Stored: w.seen.ModTime(), Durable: true, File: file,
			}
			if err = errors.Join(err, CheckName(info.Name)); err != nil {
				unusable++
				continue
			}
			parts[info.Name] = part{info, name, w.mapped, w.seen}
		}
		if unusable > 0 {
			f.config.Log.Warn("tensors can not be used: with the file's, their names are too long or hold control characters",
				slog.String("file", file), slog.Int("tensors", unusable))
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for name, p := range parts {
		if old, ok := f.parts.byName[name]; ok && old.file == p.file { // what Digested said still holds
			p.info.Digest = old.info.Digest
			parts[name] = p
		}
	}
	x := newIndex(parts)
	hidden := slices.DeleteFunc(slices.Clone(x.names), func(name string) bool { return f.pushed.byName[name] == nil })
	f.parts = x
	if len(hidden) > 0 {
		f.config.Log.Warn("tensors of files are hidden by pushed ones of their names", slog.String("first", hidden[0]), slog.Int("tensors", len(hidden)))
	}
}
