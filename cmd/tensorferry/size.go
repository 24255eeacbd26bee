package main

import (
	"errors"
	"math"
	"slices"
	"strconv"
	"strings"
)

type sizeUnit struct {
	name  string
	bytes int64
}

// units are in ascending order. Single letters are not accepted, because 2G may mean 2·10⁹
// or 2·2³⁰.
var units = []sizeUnit{
	{"B", 1},
	{"kB", 1e3}, {"KiB", 1 << 10}, {"MB", 1e6}, {"MiB", 1 << 20},
	{"GB", 1e9}, {"GiB", 1 << 30}, {"TB", 1e12}, {"TiB", 1 << 40},
}

// parseSize parses a whole number with an optional unit: 65536, 512MiB, 2 GB.
func parseSize(text string) (int64, error) {
	digits := len(text) - len(strings.TrimLeft(text, "0123456789"))
	unit := strings.TrimPrefix(text[digits:], " ")
	if digits == len(text) {
		unit = "B"
	}
	i := slices.IndexFunc(units, func(u sizeUnit) bool { return strings.EqualFold(u.name, unit) })
	if digits == 0 || i < 0 {
		return 0, errors.New("not a size; use a whole number of bytes, kB, MB, GB, TB, KiB, MiB, GiB or TiB")
	}
	n, err := strconv.ParseInt(text[:digits], 10, 64)
	if err != nil || n > math.MaxInt64/units[i].bytes {
		return 0, errors.New("too large: more than 2^63-1 bytes")
	}
	return n * units[i].bytes, nil
}

// formatSize formats a size in the largest unit that gives a whole number.
func formatSize(n int64) string {
	for _, u := range slices.Backward(units[1:]) {
		if n != 0 && n%u.bytes == 0 {
			return strconv.FormatInt(n/u.bytes, 10) + u.name
		}
	}
	return strconv.FormatInt(n, 10)
}
