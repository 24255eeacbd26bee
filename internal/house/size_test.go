//go:build grpcnotrace

package house

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// programSize rounds up, so that the number changes rarely. It builds as make build does, but for
// -trimpath, with which all packages would be compiled once more, of the standard library, too; and
// only in tests of that tag, or all that needs gRPC would be.
func programSize(t *testing.T) int {
	path := filepath.Join(t.TempDir(), "tensorferry")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-tags", "grpcnotrace", "-o", path, program)
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", cmd, err, out)
	}
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	const mb = 1 << 20
	return int((info.Size() + mb - 1) / mb)
}
