package main

import (
	"errors"
	"os"
	"os/exec"
	"testing"

	"github.com/tensorferry/tensorferry/internal/cli/display"
	"github.com/tensorferry/tensorferry/internal/cli/fail"
)

func TestAnInterruptedShowDoesNotWaitForItsInput(t *testing.T) {
	exe, err := exec.LookPath("tensorferry")
	if err != nil {
		t.Fatal(err)
	}
	c := program(t, exe, "show", "-", "--dtype", "int8", "--shape", "1000000")
	stdin, err := c.StdinPipe() // never the whole tensor
	if err != nil {
		t.Fatal(err)
	}
	defer stdin.Close()
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	// More than a pipe holds: when it is written, show reads.
	if _, err := stdin.Write(make([]byte, 200_000)); err != nil {
		t.Fatal(err)
	}
	if err := c.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	var exit *exec.ExitError
	if err := c.Wait(); !errors.As(err, &exit) || exit.ExitCode() != fail.ExitInterrupted {
		t.Errorf("ended with %v", err)
	}
}

func TestAHistogramIsDrawnFromNothingToTheMost(t *testing.T) {
	for text, counts := range map[string][]int64{
		" ▁█": {0, 1, 1000},
		"█":   {7},
		"██":  {1 << 62, 1 << 62},
		"":    nil,
	} {
		if got := display.Bars(counts); got != text {
			t.Errorf("%v is drawn %q, want %q", counts, got, text)
		}
	}
}

func TestSizesAreForPeople(t *testing.T) {
	for text, n := range map[string]int64{
		"0 bytes": 0, "1023 bytes": 1023, "1.0 KiB": 1024, "1024.0 KiB": 1<<20 - 1, "1.0 MiB": 1 << 20, "2048.0 TiB": 1 << 51,
	} {
		if got := display.Size(n); got != text {
			t.Errorf("%d is %q, want %q", n, got, text)
		}
	}
}

func TestANameDoesNotReachTheTerminalAsACommand(t *testing.T) {
	if got := display.Plain("läyer 1.\x1b[2J\r\n"); got != "läyer 1.\uFFFD[2J\uFFFD\uFFFD" {
		t.Errorf("it is %q", got)
	}
}
