package main

import (
	"testing"

	"github.com/tensorferry/tensorferry/internal/cli/display"
)

func TestAnInterruptedShowDoesNotWaitForItsInput(t *testing.T) {
	// More than a pipe holds: when it is written, show reads.
	interrupted(t, fed(t, "show", "-", "--dtype", "int8", "--shape", "1000000"))
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
