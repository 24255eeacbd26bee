package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/knadh/koanf/parsers/yaml"
	"github.com/knadh/koanf/providers/env/v2"
	"github.com/knadh/koanf/providers/file"
	"github.com/knadh/koanf/v2"
	"github.com/spf13/pflag"
)

const (
	// envPrefix begins every environment variable that serve reads.
	envPrefix = "TENSORFERRY_"
	// configEnv names the file, as --config does.
	configEnv = envPrefix + "CONFIG"
	// serverEnv is what --server is where it is not given; serve has no such setting.
	serverEnv = envPrefix + "SERVER"
	// delimiter would part the keys of nested settings; there are none.
	delimiter = "."
)

// notSettings are the flags that only the command line has.
var notSettings = []string{"config", "print-config", "child", "help"}

// origins says for each setting where its value comes from.
type origins map[string]string

// configure gives every flag that was not typed its value from environ or, below
// it, from the file that --config or TENSORFERRY_CONFIG names. Keys are the names
// of the flags: each flag is declared, documented and checked once.
func configure(flags *pflag.FlagSet, environ []string) (origins, error) {
	path := flags.Lookup("config").Value.String()
	environment := koanf.New(delimiter)
	_ = environment.Load(env.Provider(delimiter, env.Opt{ // it reads what is there
		Prefix: envPrefix, EnvironFunc: func() []string { return environ },
		TransformFunc: func(name, value string) (string, any) {
			switch name {
			case serverEnv:
				return "", nil
			case configEnv:
				path = cmp.Or(path, value)
				return "", nil
			}
			return strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(name, envPrefix), "_", "-")), value
		},
	}), nil)
	from := make(origins)
	if path != "" {
		written := koanf.New(delimiter)
		if err := written.Load(file.Provider(path), yaml.Parser()); err != nil {
			return nil, usage("config file %s: %v", path, err)
		}
		name := func(key string) string { return key + " in " + path }
		if err := from.apply(flags, written, "file "+path, name); err != nil {
			return nil, err
		}
	}
	name := func(key string) string { return envPrefix + strings.ToUpper(strings.ReplaceAll(key, "-", "_")) }
	if err := from.apply(flags, environment, "environment", name); err != nil {
		return nil, err
	}
	return from, nil
}

// apply sets the flags that were not typed to a layer's values. It fails, with the
// setting as name writes it, for one that is unknown or has no good value.
func (o origins) apply(flags *pflag.FlagSet, layer *koanf.Koanf, where string, name func(key string) string) error {
	values := layer.All()
	for _, key := range slices.Sorted(maps.Keys(values)) {
		f := flags.Lookup(key)
		if f == nil || slices.Contains(notSettings, key) {
			return usage("%s is no setting; the nearest is %s", name(key), name(nearest(key, settings(flags))))
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

// set gives a flag a value from a file, or a text.
func set(v pflag.Value, value any) error {
	list, isList := v.(pflag.SliceValue)
	switch value := value.(type) {
	case nil, map[string]any:
		return errors.New("there is no value")
	case []any:
		if !isList {
			return errors.New("it takes one value, not a list")
		}
		texts := make([]string, len(value))
		for i, each := range value {
			texts[i] = fmt.Sprint(each)
		}
		return list.Replace(texts)
	}
	text := fmt.Sprint(value)
	if isList {
		return list.Replace(strings.Split(text, ","))
	}
	if err := v.Set(text); err != nil {
		return fmt.Errorf("%q: %w", text, err)
	}
	return nil
}

// settings are the names of all flags that are settings, in the order of --help.
func settings(flags *pflag.FlagSet) []string {
	var names []string
	flags.VisitAll(func(f *pflag.Flag) {
		if !slices.Contains(notSettings, f.Name) {
			names = append(names, f.Name)
		}
	})
	return names
}

// nearest is the name that takes the fewest letters added, dropped and changed to
// be made from key.
func nearest(key string, names []string) string {
	distance := func(a, b string) int {
		row := make([]int, len(b)+1) // from the letters of a so far to each start of b
		for j := range row {
			row[j] = j
		}
		for i := range len(a) {
			diagonal := row[0]
			row[0] = i + 1
			for j := range len(b) {
				change := diagonal
				if a[i] != b[j] {
					change++
				}
				diagonal = row[j+1]
				row[j+1] = min(change, row[j]+1, row[j+1]+1)
			}
		}
		return row[len(b)]
	}
	key = key[:min(len(key), 100)] // nobody's name for anything is longer
	return slices.MinFunc(names, func(a, b string) int { return distance(key, a) - distance(key, b) })
}

// printConfig writes every setting as a file for --config, with where its value
// comes from.
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
		if v, ok := f.Value.(interface{ automatic() bool }); ok && v.automatic() {
			where += "; 0 is automatic"
		}
		var value any = f.Value.String()
		switch list, isList := f.Value.(pflag.SliceValue); {
		case isList:
			value = list.GetSlice()
		case f.Value.Type() == "bool":
			value = value == "true"
		case f.Value.Type() != "string":
			if n, err := strconv.Atoi(f.Value.String()); err == nil {
				value = n
			}
		}
		text, err := yaml.Parser().Marshal(map[string]any{name: value})
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

// bounded is a flag whose value has a least and a most.
type bounded[T int | int64 | time.Duration] struct {
	value       *T
	standard    T // what the flag is at first; allowed, whatever the bounds
	least, most T
	kind        string
	parse       func(string) (T, error)
	format      func(T) string
}

func (b bounded[T]) Set(text string) error {
	n, err := b.parse(text)
	if err != nil {
		return err
	}
	if n != b.standard && (n < b.least || n > b.most) {
		return fmt.Errorf("give %s to %s", b.format(b.least), b.format(b.most))
	}
	*b.value = n
	return nil
}

func (b bounded[T]) String() string {
	if b.value == nil { // pflag asks a zero value
		return ""
	}
	return b.format(*b.value)
}

// automatic reports whether the value is none itself, and another is found at start.
func (b bounded[T]) automatic() bool { return *b.value < b.least }

func (b bounded[T]) Type() string { return b.kind }

// sizeVar adds a flag of bytes: 65536, 512MiB, 2GB.
func sizeVar(f *pflag.FlagSet, v *int64, name string, value, least, most int64, text string) {
	*v = value
	f.Var(bounded[int64]{v, value, least, most, "size", parseSize, formatSize}, name, text)
}

// countVar adds a flag that counts something, from 1 to what 31 bits hold.
func countVar(f *pflag.FlagSet, v *int, name string, value int, text string) {
	*v = value
	f.Var(bounded[int]{v, value, 1, math.MaxInt32, "count", func(text string) (int, error) {
		n, err := strconv.Atoi(text)
		if err != nil {
			return 0, errors.New("it is no whole number")
		}
		return n, nil
	}, strconv.Itoa}, name, text)
}

// durationVar adds a flag of a time: 1s, 1m30s, 250ms; more than a year is a
// typing error.
func durationVar(f *pflag.FlagSet, v *time.Duration, name string, value, least time.Duration, text string) {
	*v = value
	f.Var(bounded[time.Duration]{v, value, least, 365 * 24 * time.Hour, "duration", func(text string) (time.Duration, error) {
		d, err := time.ParseDuration(text)
		if err != nil {
			return 0, errors.New("it is no time; write 10s, 1m30s or 250ms")
		}
		return d, nil
	}, shortDuration}, name, text)
}

// shortDuration leaves out what is zero: 10m, not 10m0s.
func shortDuration(d time.Duration) string {
	text := d.String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}

// choice is a flag that is one of a few words.
type choice struct {
	value *string
	words []string
}

func (c choice) Set(text string) error {
	if !slices.Contains(c.words, text) {
		return fmt.Errorf("give %s", strings.Join(c.words, " or "))
	}
	*c.value = text
	return nil
}

func (c choice) String() string {
	if c.value == nil { // pflag asks a zero value
		return ""
	}
	return *c.value
}

func (choice) Type() string { return "word" }

// choiceVar adds a flag that is one of words, at first the first.
func choiceVar(f *pflag.FlagSet, v *string, name, text string, words ...string) {
	*v = words[0]
	f.Var(choice{v, words}, name, text+": "+strings.Join(words, ", "))
}
