package store

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// reserveDisk takes n bytes of disk for f, so that a full disk is met before the
// first byte is on its way. A file system that cannot promise is left alone.
func reserveDisk(f *os.File, n int64) error {
	// Asked for too much, ext4 takes all there is before it fails.
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &fs); err == nil && fs.Blocks > 0 && uint64(n)/uint64(fs.Bsize) > fs.Bavail {
		return unix.ENOSPC
	}
	for {
		err := unix.Fallocate(int(f.Fd()), 0, 0, n)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOSYS):
			return nil
		default:
			return err
		}
	}
}

// writeViews writes views to off, with one system call for many.
func writeViews(f *os.File, off int64, views [][]byte) error {
	for len(views) > 0 {
		n, err := unix.Pwritev(int(f.Fd()), views[:min(len(views), maxViews)], off)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return err
		}
		off += int64(n)
		batch := len(views) - min(len(views), maxViews)
		for len(views) > batch && n >= len(views[0]) {
			n -= len(views[0])
			views = views[1:]
		}
		if len(views) > batch { // cut short within a view: WriteAt finishes that, or says why not
			m, err := f.WriteAt(views[0][n:], off)
			if err != nil {
				return err
			}
			off += int64(m)
			views = views[1:]
		}
	}
	return nil
}

// startWriteBack tells the disk to begin with n bytes. It is a hint: an error
// shows again in the fsync at the end.
func startWriteBack(f *os.File, off, n int64) {
	_ = unix.SyncFileRange(int(f.Fd()), off, n, unix.SYNC_FILE_RANGE_WRITE)
}
