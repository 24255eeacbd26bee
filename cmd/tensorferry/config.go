package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/tensor"
)

// envPrefix begins every environment variable that serve reads.
const envPrefix = "TENSORFERRY_"

// pythonEnv is the interpreter for --python, which therefore has no variable of its own.
const pythonEnv = envPrefix + "PYTHON"

// notSettings are flags for the command line only.
var notSettings = []string{"config", "print-config", "child", "python-fd", "help"}

// notOurs are the other variables with the prefix: flags of clients, and of the Python package.
var notOurs = []string{"server", "tls", "ca", "cert", "key", "token", "server-name", "python", "bin", "link-memory"}

// servicesEnv matches what Kubernetes makes, behind the prefix, for a Service whose name begins
// with tensorferry (kubernetes.io/docs/concepts/services-networking/service).
var servicesEnv = regexp.MustCompile(`^(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?)=|^(\w+_)?PORT=(tcp|udp|sctp)://`)

// variable returns the environment variable of a flag.
func variable(flag string) string {
	return envPrefix + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

type origins map[string]string

// configure sets the flags that are not on the command line from environ or, failing
// that, from the file of --config or TENSORFERRY_CONFIG, whose keys are the names of flags.
// It returns the variables of a Kubernetes Service, which it ignores.
func configure(flags *pflag.FlagSet, environ []string) (from origins, services []string, err error) {
	path := flags.Lookup("config").Value.String()
	environment := map[string]any{}
	for _, text := range environ {
		rest, ours := strings.CutPrefix(text, envPrefix)
		name, value, _ := strings.Cut(rest, "=")
		switch key := strings.ToLower(strings.ReplaceAll(name, "_", "-")); {
		case !ours || slices.Contains(notOurs, key):
		case servicesEnv.MatchString(rest):
			services = append(services, envPrefix+name)
		case key == "config":
			path = cmp.Or(path, value)
		default:
			environment[key] = value
		}
	}
	from = make(origins)
	if path != "" {
		written := map[string]any{}
		text, err := os.ReadFile(path)
		if err == nil {
			err = yaml.Unmarshal(text, &written)
		}
		if err != nil {
			return nil, nil, usage("config file %s: %v", path, err)
		}
		if err := from.apply(flags, written, "file "+path, func(key string) string { return key + " in " + path }); err != nil {
			return nil, nil, err
		}
	}
	return from, services, from.apply(flags, environment, "environment", variable)
}

// apply sets the flags that are not on the command line to the values of a layer. name
// returns a setting's name for error messages.
func (o origins) apply(flags *pflag.FlagSet, values map[string]any, where string, name func(key string) string) error {
	for _, key := range slices.Sorted(maps.Keys(values)) {
		f := flags.Lookup(key)
		if f == nil || slices.Contains(notSettings, key) {
			return usage("%s is not a setting; did you mean %s?", name(key), name(nearest(key, settings(flags))))
		}
		if f.Changed {
			continue
		}
		if err := set(f.Value, values[key]); err != nil {
			return usage("%s: %v", name(key), err)
		}
		o[key] = where
	}
	return nil
}

// set sets a flag to a value of a YAML file or of the environment.
func set(v pflag.Value, value any) error {
	list, isList := v.(pflag.SliceValue)
	switch value := value.(type) {
	case nil:
		return errors.New("no value")
	case map[string]any:
		return errors.New("it takes a value, not a group of keys")
	case []any:
		if !isList {
			return errors.New("it takes one value, not a list")
		}
		return list.Replace(each(value, func(v any) string { return fmt.Sprint(v) }))
	}
	text := fmt.Sprint(value)
	if isList {
		return list.Replace(strings.Split(text, ","))
	}
	if err := v.Set(text); err != nil {
		return valueError(v, text, err)
	}
	return nil
}

// valueError is the error of a flag that rejects a value, without the texts of Go's parsers.
func valueError(v pflag.Value, text string, err error) error {
	if bad, ok := errors.AsType[*strconv.NumError](err); ok {
		switch {
		case v.Type() == "bool":
			err = errors.New("use true or false")
		case errors.Is(bad, strconv.ErrRange):
			err = errors.New("out of range")
		default:
			err = errors.New("not a whole number")
		}
	}
	return fmt.Errorf("%q: %w", text, err)
}

// flagError makes a usage error of one of pflag, and suggests the nearest flag.
func flagError(c *cobra.Command, err error) error {
	if unknown, ok := errors.AsType[*pflag.NotExistError](err); ok && unknown.GetSpecifiedShortnames() == "" {
		like := nearest(unknown.GetSpecifiedName(), flagNames(c.Flags(), func(f *pflag.Flag) bool { return !f.Hidden }))
		return usageError{hinted{err, fmt.Sprintf("did you mean --%s? see %s --help for usage", like, c.CommandPath())}}
	}
	if invalid, ok := errors.AsType[*pflag.InvalidValueError](err); ok {
		f := invalid.GetFlag()
		err = fmt.Errorf("--%s %w", f.Name, valueError(f.Value, invalid.GetValue(), invalid.Unwrap()))
	}
	return usageError{err}
}

// settings returns the names of all flags that are settings, in the order of --help.
func settings(flags *pflag.FlagSet) []string {
	return flagNames(flags, func(f *pflag.Flag) bool { return !slices.Contains(notSettings, f.Name) })
}

func flagNames(flags *pflag.FlagSet, which func(*pflag.Flag) bool) (names []string) {
	flags.VisitAll(func(f *pflag.Flag) {
		if which(f) {
			names = append(names, f.Name)
		}
	})
	return names
}

// nearest returns the name most similar to key, as cobra does for mistyped commands.
func nearest(key string, names []string) string {
	key = key[:min(len(key), 100)] // no name is longer
	c := new(cobra.Command)
	for _, name := range names {
		c.AddCommand(&cobra.Command{Use: name, Run: func(*cobra.Command, []string) {}})
	}
	for c.SuggestionsMinimumDistance = 1; ; c.SuggestionsMinimumDistance++ {
		if like := c.SuggestionsFor(key); len(like) > 0 {
			return like[0]
		}
	}
}

// printConfig writes all settings and the origins of their values as a file for --config.
func printConfig(w io.Writer, flags *pflag.FlagSet, from origins) error {
	for _, name := range settings(flags) {
		f := flags.Lookup(name)
		where := from[name]
		switch {
		case f.Changed:
			where = "flag"
		case where == "":
			where = "default"
		}
		if o, ok := f.Value.(option); ok && o.automatic != nil && o.automatic() {
			where += "; 0 is automatic"
		}
		var value any = f.Value.String()
		if list, isList := f.Value.(pflag.SliceValue); isList {
			value = list.GetSlice()
		} else if slices.Contains([]string{"bool", "count", "size"}, f.Value.Type()) {
			_ = yaml.Unmarshal([]byte(f.Value.String()), &value) // sizes with a unit stay texts
		}
		text, err := yaml.Marshal(map[string]any{name: value})
		if err != nil {
			return err
		}
		first, rest, _ := strings.Cut(string(text), "\n")
		if _, err := fmt.Fprintf(w, "%s # %s\n%s", first, where, rest); err != nil {
			return err
		}
	}
	return nil
}

// option is a flag whose value has a syntax of its own.
type option struct {
	kind string // what --help and errors call the value
	set  func(text string) error
	text func() string // which set accepts
	// automatic reports whether the value stands for one that is determined at startup.
	automatic func() bool
}

func (o option) Set(text string) error { return o.set(text) }
func (o option) String() string        { return o.text() }
func (o option) Type() string          { return o.kind }

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
	f.Var(option{kind, set, func() string { return format(int64(*v)) }, func() bool { return int64(*v) < least }}, name, text)
}

// sizeVar adds a flag for a size in bytes: 65536, 512MiB, 2GB.
func sizeVar[T ~int | ~int64 | ~uint32](f *pflag.FlagSet, v *T, name string, value T, least, most int64, text string) {
	numberVar(f, v, name, value, least, most, text, "size", parseSize, formatSize)
}

// countVar adds a flag for a count from 1 to math.MaxInt32.
func countVar(f *pflag.FlagSet, v *int, name string, value int, text string) {
	countsVar(f, v, name, value, 1, math.MaxInt32, text)
}

func countsVar(f *pflag.FlagSet, v *int, name string, value int, least, most int64, text string) {
	parse := func(text string) (int64, error) { return strconv.ParseInt(text, 10, 64) }
	numberVar(f, v, name, value, least, most, text, "count", parse, func(n int64) string { return strconv.FormatInt(n, 10) })
}

// durationVar adds a flag for a duration of at most a year: 1s, 1m30s, 250ms.
func durationVar[T ~int64](f *pflag.FlagSet, v *T, name string, value T, least time.Duration, text string) {
	parse := func(text string) (int64, error) {
		d, err := time.ParseDuration(text)
		if err != nil {
			err = errors.New("not a duration; use 10s, 1m30s or 250ms")
		}
		return int64(d), err
	}
	numberVar(f, v, name, value, int64(least), int64(365*24*time.Hour), text, "duration", parse, func(n int64) string { return shortDuration(time.Duration(n)) })
	if value == 0 {
		f.Lookup(name).DefValue = "0" // --help omits a default of "0"
	}
}

// zeros matches redundant units at the end of a duration: 10m, not 10m0s.
var zeros = regexp.MustCompile(`([hm])(?:0m)?0s$`)

func shortDuration(d time.Duration) string { return zeros.ReplaceAllString(d.String(), "$1") }

// choiceVar adds a flag whose value is one of words; the first is the default.
func choiceVar(c *cobra.Command, v *string, name, text string, words ...string) {
	*v = words[0]
	set := func(text string) error {
		if last := len(words) - 1; !slices.Contains(words, text) {
			return fmt.Errorf("use %s or %s", strings.Join(words[:last], ", "), words[last])
		}
		*v = text
		return nil
	}
	c.Flags().Var(option{kind: "word", set: set, text: func() string { return *v }}, name, text+": "+strings.Join(words, ", "))
	complete(c, name, words)
}

const bbrText = "send by the congestion control BBR, which stands losses;\nthe kernel must allow it"

// lanesVar adds the flags for the connections of a client.
func lanesVar(f *pflag.FlagSet, cfg *client.Config) {
	cfg.Lanes = server.DefaultLanes
	set := func(text string) error {
		digits, fixed := strings.CutPrefix(text, "=")
		n, err := strconv.Atoi(digits)
		if err != nil || n < 0 || n > server.DefaultLanes || fixed && n == 0 {
			return fmt.Errorf("use 0 to %d, or =1 to =%d", server.DefaultLanes, server.DefaultLanes)
		}
		cfg.Lanes, cfg.FixedLanes = cmp.Or(n, -1), fixed // 0 would be the default
		return nil
	}
	text := func() string { return map[bool]string{true: "="}[cfg.FixedLanes] + strconv.Itoa(max(cfg.Lanes, 0)) }
	f.Var(option{kind: "count", set: set, text: text}, "lanes", "the most extra connections for large tensors, opened as long as each\nstep is faster; =N opens N; 0 is none")
	f.BoolVar(&cfg.BBR, "bbr", false, bbrText)
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

// parseSize parses a whole number with an optional unit: 65536, 512MiB, 2 GB.
func parseSize(text string) (int64, error) {
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

// formatSize formats a size in the largest unit that gives a whole number.
func formatSize(n int64) string {
	for _, u := range slices.Backward(units[1:]) {
		if n != 0 && n%u.bytes == 0 {
			return strconv.FormatInt(n/u.bytes, 10) + u.name
		}
	}
	return strconv.FormatInt(n, 10)
}

func dtypeFlag(c *cobra.Command, to *string, value, text string) {
	c.Flags().StringVar(to, "dtype", value, text)
	complete(c, "dtype", each(tensor.DataTypes(), tensor.DataType.String))
}

func complete(c *cobra.Command, flag string, values []string) {
	if err := c.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)); err != nil {
		panic(err) // the command has no such flag
	}
}
