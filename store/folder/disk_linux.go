package folder

import (
	"errors"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// freeDisk returns how many bytes this process may still write where f is; false if that is not
// known.
func freeDisk(f *os.File) (int64, bool) {
	var fs unix.Statfs_t
	err := unix.Fstatfs(int(f.Fd()), &fs)
	return int64(fs.Bavail) * fs.Bsize, err == nil
}

// reserveDisk reserves n bytes of disk space for f, so that a full disk is noticed before
// the first byte arrives. It does nothing on a file system that cannot reserve.
func reserveDisk(f *os.File, n int64) error {
	// If asked for too much, ext4 takes all free space before it fails.
	if free, known := freeDisk(f); known && n > free {
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
	for batch := range slices.Chunk(views, 1024) { // IOV_MAX
		n, err := unix.Pwritev(int(f.Fd()), batch, off)
		if errors.Is(err, unix.EINTR) {
			n, err = 0, nil
		}
		for _, v := range batch {
			done := min(n, len(v))
			if n -= done; done < len(v) && err == nil { // a short write: WriteAt completes it or returns the error
				_, err = f.WriteAt(v[done:], off+int64(done))
			}
			off += int64(len(v))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// startWriteBack asks the system to start writing n bytes to the disk. It is a hint: an
// error shows again in the final fsync.
func startWriteBack(f *os.File, off, n int64) {
	_ = unix.SyncFileRange(int(f.Fd()), off, n, unix.SYNC_FILE_RANGE_WRITE)
}
