//go:build !linux

package folder

import "os"

// freeDisk does not know: there is no portable way.
func freeDisk(*os.File) (int64, bool) { return 0, false }

// reserveDisk does nothing: there is no portable way.
func reserveDisk(*os.File, int64) error { return nil }

// writeViews writes views to off, one by one.
func writeViews(f *os.File, off int64, views [][]byte) error {
	for _, v := range views {
		n, err := f.WriteAt(v, off)
		if err != nil {
			return err
		}
		off += int64(n)
	}
	return nil
}

// startWriteBack does nothing: the final fsync writes everything.
func startWriteBack(*os.File, int64, int64) {}
