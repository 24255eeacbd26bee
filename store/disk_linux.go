package store

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// reserveDisk reserves n bytes of disk space for f, so that a full disk is noticed before
// the first byte arrives. It does nothing on a file system that cannot reserve.
func reserveDisk(f *os.File, n int64) error {
	// If asked for too much, ext4 takes all free space before it fails.
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

// writeViews writes views to off, many with one system call.
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
		if len(views) > batch { // a short write within a view: WriteAt completes it or returns the error
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

// startWriteBack asks the system to start writing n bytes to the disk. It is a hint: an
// error shows again in the final fsync.
func startWriteBack(f *os.File, off, n int64) {
	_ = unix.SyncFileRange(int(f.Fd()), off, n, unix.SYNC_FILE_RANGE_WRITE)
}
