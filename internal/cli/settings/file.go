// Package settings has the kinds of values that flags take, and sets the flags of serve from the
// environment and from a file.
package settings

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/tensorferry/tensorferry/internal/cli/display"
	"github.com/tensorferry/tensorferry/internal/cli/fail"
)

// envPrefix begins every environment variable that serve reads.
const envPrefix = "TENSORFERRY_"

// PythonEnv is the interpreter for --python, which therefore has no variable of its own.
const PythonEnv = envPrefix + "PYTHON"

// notSettings are flags for the command line only.
var notSettings = []string{"config", "print-config", "child", "python-fd", "help"}

// notOurs are the other variables with the prefix: flags of clients, and of the Python package.
var notOurs = []string{"server", "tls", "ca", "cert", "key", "token", "server-name", "python", "bin", "link-memory"}

// servicesEnv matches what Kubernetes makes, behind the prefix, for a Service whose name begins
// with tensorferry (kubernetes.io/docs/concepts/services-networking/service).
var servicesEnv = regexp.MustCompile(`^(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?)=|^(\w+_)?PORT=(tcp|udp|sctp)://`)

// Variable returns the environment variable of a flag.
func Variable(flag string) string {
	return envPrefix + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// Origins says of each setting where its value is from, unless it is the default.
type Origins map[string]string

// Configure sets the flags that are not on the command line from environ or, failing
// that, from the file of --config or TENSORFERRY_CONFIG, whose keys are the names of flags.
// It returns the variables of a Kubernetes Service, which it ignores.
func Configure(flags *pflag.FlagSet, environ []string) (from Origins, services []string, err error) {
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
	from = make(Origins)
	if path != "" {
		written := map[string]any{}
		text, err := os.ReadFile(path)
		if err == nil {
			err = yaml.Unmarshal(text, &written)
		}
		if err != nil {
			return nil, nil, fail.Usage("config file %s: %v", path, err)
		}
		if err := from.apply(flags, written, "file "+path, func(key string) string { return key + " in " + path }); err != nil {
			return nil, nil, err
		}
	}
	return from, services, from.apply(flags, environment, "environment", Variable)
}

// apply sets the flags that are not on the command line to the values of a layer. name
// returns a setting's name for error messages.
func (o Origins) apply(flags *pflag.FlagSet, values map[string]any, where string, name func(key string) string) error {
	for _, key := range slices.Sorted(maps.Keys(values)) {
		f := flags.Lookup(key)
		if f == nil || slices.Contains(notSettings, key) {
			return fail.Usage("%s is not a setting; did you mean %s?", name(key), name(Nearest(key, Names(flags))))
		}
		if f.Changed {
			continue
		}
		if err := set(f, values[key]); err != nil {
			return fail.Usage("%s: %v", name(key), err)
		}
		o[key] = where
	}
	return nil
}

// set sets a flag to a value of a YAML file or of the environment.
func set(f *pflag.Flag, value any) error {
	v := f.Value
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
		return list.Replace(display.Each(value, func(v any) string { return fmt.Sprint(v) }))
	}
	text := fmt.Sprint(value)
	switch {
	case isList && f.Annotations[commas] != nil:
		return list.Replace([]string{text})
	case isList:
		return list.Replace(strings.Split(text, ","))
	}
	if err := v.Set(text); err != nil {
		return ValueError(v, text, err)
	}
	return nil
}

// ValueError is the error of a flag that rejects a value, without the texts of Go's parsers.
func ValueError(v pflag.Value, text string, err error) error {
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

// Names returns the names of all flags that are settings, in the order of --help.
func Names(flags *pflag.FlagSet) []string {
	return FlagNames(flags, func(f *pflag.Flag) bool { return !f.Hidden && !slices.Contains(notSettings, f.Name) })
}

// Former returns the settings that went, and were set.
func Former(flags *pflag.FlagSet, from Origins) (former []*pflag.Flag) {
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Hidden && !slices.Contains(notSettings, f.Name) && (f.Changed || from[f.Name] != "") {
			former = append(former, f)
		}
	})
	return former
}

// FlagNames returns the names of some flags, in the order of --help.
func FlagNames(flags *pflag.FlagSet, which func(*pflag.Flag) bool) (names []string) {
	flags.VisitAll(func(f *pflag.Flag) {
		if which(f) {
			names = append(names, f.Name)
		}
	})
	return names
}

// Nearest returns the name most similar to key.
func Nearest(key string, names []string) string {
	key = key[:min(len(key), 100)] // no name is longer
	return slices.MinFunc(names, func(a, b string) int { return cmp.Compare(distance(key, a), distance(key, b)) })
}

// distance returns how many characters have to be added, removed or replaced to make b of a: the
// distance of Levenshtein. A name of which only the beginning was typed is near.
func distance(a, b string) int {
	if a != "" && strings.HasPrefix(b, a) {
		return 0
	}
	above := make([]int, len(b)+1) // of what a begins with, to each beginning of b
	for j := range above {
		above[j] = j
	}
	for i := range len(a) {
		diagonal := above[0]
		above[0] = i + 1
		for j := range len(b) {
			replaced := diagonal
			if a[i] != b[j] {
				replaced++
			}
			diagonal = above[j+1]
			above[j+1] = min(replaced, above[j]+1, above[j+1]+1)
		}
	}
	return above[len(b)]
}

// Print writes all settings and the origins of their values as a file for --config.
func Print(w io.Writer, flags *pflag.FlagSet, from Origins) error {
	former := display.Each(Former(flags, from), func(f *pflag.Flag) string { return f.Name })
	for _, name := range append(Names(flags), former...) {
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
