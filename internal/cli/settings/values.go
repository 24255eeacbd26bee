package settings

import (
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

// option is a flag whose value has a syntax of its own.
type option struct {
	kind string // what --help and errors call the value
	set  func(text string) error
	text func() string // which set accepts
	// words are all values, if there are few.
	words []string
	// automatic reports whether the value stands for one that is determined at startup.
	automatic func() bool
}

// Option adds a flag whose values have a syntax of their own.
func Option(f *pflag.FlagSet, name, kind, usage string, set func(text string) error, text func() string) {
	f.Var(option{kind: kind, set: set, text: text}, name, usage)
}

// Words returns the values of a flag that has few; else none.
func Words(v pflag.Value) []string {
	o, _ := v.(option)
	return o.words
}

func (o option) Set(text string) error { return o.set(text) }

func (o option) String() string { return o.text() }

func (o option) Type() string { return o.kind }

// numberVar adds a flag for a number that is value or lies between least and most.
func numberVar[T ~int | ~int64 | ~uint32](f *pflag.FlagSet, v *T, name string, value T, least, most int64, text, kind string, parse func(string) (int64, error), format func(int64) string) {
	*v = value
	set := func(text string) error {
		n, err := parse(text)
		if err != nil {
			return err
		}
		if n != int64(value) && (n < least || n > most) {
			return fmt.Errorf("use %s to %s", format(least), format(most))
		}
		*v = T(n)
		return nil
	}
	f.Var(option{kind: kind, set: set, text: func() string { return format(int64(*v)) }, automatic: func() bool { return int64(*v) < least }}, name, text)
}

// Size adds a flag for a size in bytes: 65536, 512MiB, 2GB.
func Size[T ~int | ~int64 | ~uint32](f *pflag.FlagSet, v *T, name string, value T, least, most int64, text string) {
	numberVar(f, v, name, value, least, most, text, "size", ParseSize, FormatSize)
}

// Count adds a flag for a count from 1 to math.MaxInt32.
func Count(f *pflag.FlagSet, v *int, name string, value int, text string) {
	CountIn(f, v, name, value, 1, math.MaxInt32, text)
}

// CountIn adds a flag for a count from least to most.
func CountIn(f *pflag.FlagSet, v *int, name string, value int, least, most int64, text string) {
	parse := func(text string) (int64, error) { return strconv.ParseInt(text, 10, 64) }
	numberVar(f, v, name, value, least, most, text, "count", parse, func(n int64) string { return strconv.FormatInt(n, 10) })
}

// Duration adds a flag for a duration of at most a year: 1s, 1m30s, 250ms.
func Duration[T ~int64](f *pflag.FlagSet, v *T, name string, value T, least time.Duration, text string) {
	parse := func(text string) (int64, error) {
		d, err := time.ParseDuration(text)
		if err != nil {
			err = errors.New("not a duration; use 10s, 1m30s or 250ms")
		}
		return int64(d), err
	}
	numberVar(f, v, name, value, int64(least), int64(365*24*time.Hour), text, "duration", parse, func(n int64) string { return ShortDuration(time.Duration(n)) })
	if value == 0 {
		f.Lookup(name).DefValue = "0" // --help omits a default of "0"
	}
}

// zeros matches redundant units at the end of a duration: 10m, not 10m0s.
var zeros = regexp.MustCompile(`([hm])(?:0m)?0s$`)

// ShortDuration formats a duration without units of zero.
func ShortDuration(d time.Duration) string { return zeros.ReplaceAllString(d.String(), "$1") }

// Choice adds a flag whose value is one of words; the first is the default.
func Choice(f *pflag.FlagSet, v *string, name, text string, words ...string) {
	*v = words[0]
	set := func(text string) error {
		if last := len(words) - 1; !slices.Contains(words, text) {
			return fmt.Errorf("use %s or %s", strings.Join(words[:last], ", "), words[last])
		}
		*v = text
		return nil
	}
	f.Var(option{kind: "word", set: set, text: func() string { return *v }, words: words}, name, text+": "+strings.Join(words, ", "))
}

// units are in ascending order. None is a single letter: 2G may mean 2·10⁹ or 2·2³⁰.
var units = []struct {
	name  string
	bytes int64
}{
	{"B", 1},
	{"kB", 1e3}, {"KiB", 1 << 10}, {"MB", 1e6}, {"MiB", 1 << 20},
	{"GB", 1e9}, {"GiB", 1 << 30}, {"TB", 1e12}, {"TiB", 1 << 40},
}

// ParseSize parses a whole number with an optional unit: 65536, 512MiB, 2 GB.
func ParseSize(text string) (int64, error) {
	digits := len(text) - len(strings.TrimLeft(text, "0123456789"))
	unit := strings.TrimPrefix(text[digits:], " ")
	if digits == len(text) {
		unit = "B"
	}
	for _, u := range units {
		if digits > 0 && strings.EqualFold(u.name, unit) {
			n, err := strconv.ParseInt(text[:digits], 10, 64)
			if err != nil || n > math.MaxInt64/u.bytes {
				return 0, errors.New("too large: more than 2^63-1 bytes")
			}
			return n * u.bytes, nil
		}
	}
	return 0, errors.New("not a size; use a whole number of bytes, kB, MB, GB, TB, KiB, MiB, GiB or TiB")
}

// FormatSize formats a size in the largest unit that gives a whole number.
func FormatSize(n int64) string {
	for _, u := range slices.Backward(units[1:]) {
		if n != 0 && n%u.bytes == 0 {
			return strconv.FormatInt(n/u.bytes, 10) + u.name
		}
	}
	return strconv.FormatInt(n, 10)
}

// commas marks a flag whose values have commas: elsewhere than on the command line, too, such a
// text is one value.
const commas = "commas"

// Commas says that the values of a list have commas.
func Commas(f *pflag.FlagSet, name string) {
	f.Lookup(name).Annotations = map[string][]string{commas: {}}
}

// Parts returns what is before the first comma of a value, and sets flags from what follows, such
// as train,lease=30s. A flag that is a bool needs no value.
func Parts(text string, f *pflag.FlagSet) (first string, err error) {
	parts := strings.Split(text, ",")
	for _, part := range parts[1:] {
		name, value, valued := strings.Cut(part, "=")
		flag := f.Lookup(name)
		if flag == nil {
			all := FlagNames(f, func(*pflag.Flag) bool { return true })
			return "", fmt.Errorf("%q is not one of %s", name, strings.Join(all, ", "))
		}
		if !valued {
			value = flag.NoOptDefVal
		}
		if value == "" {
			return "", fmt.Errorf("%s has no value; use %[1]s=…", name)
		}
		if err := flag.Value.Set(value); err != nil {
			return "", fmt.Errorf("%s=%w", name, ValueError(flag.Value, value, err))
		}
	}
	return parts[0], nil
}
