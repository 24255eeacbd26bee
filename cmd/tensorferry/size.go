package main

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// units of bytes, from the smallest. One letter is none: people disagree whether
// 2G is 2·10⁹ or 2·2³⁰.
var units = []struct {
	name  string
	bytes int64
}{
	{"B", 1},
	{"kB", 1e3}, {"KiB", 1 << 10}, {"MB", 1e6}, {"MiB", 1 << 20},
	{"GB", 1e9}, {"GiB", 1 << 30}, {"TB", 1e12}, {"TiB", 1 << 40},
}

// parseSize reads a whole number of bytes, or of a unit: 65536, 512MiB, 2 GB.
func parseSize(text string) (int64, error) {
	digits := 0
	for digits < len(text) && '0' <= text[digits] && text[digits] <= '9' {
		digits++
	}
	unit := strings.TrimPrefix(text[digits:], " ")
	each := int64(0)
	for _, u := range units {
		if strings.EqualFold(unit, u.name) || unit == "" && u.bytes == 1 {
			each = u.bytes
		}
	}
	n, err := strconv.ParseInt(text[:digits], 10, 64)
	if digits == 0 || each == 0 || unit == "" && digits < len(text) {
		return 0, fmt.Errorf("%q is no size; write a whole number of bytes, or with kB, MB, GB, TB, KiB, MiB, GiB or TiB", text)
	}
	if err != nil || n > math.MaxInt64/each {
		return 0, fmt.Errorf("%s is more than fits 63 bits of bytes", text)
	}
	return n * each, nil
}

// formatSize writes a size in the unit of which it has the fewest, so that it reads
// back as the same.
func formatSize(n int64) string {
	best := units[0]
	for _, u := range units {
		if n != 0 && n%u.bytes == 0 && u.bytes > best.bytes {
			best = u
		}
	}
	if best.bytes == 1 {
		return strconv.FormatInt(n, 10)
	}
	return strconv.FormatInt(n/best.bytes, 10) + best.name
}
