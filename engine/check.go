package engine

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/tensorferry/tensorferry/tensor"
)

// ErrInfo is wrapped when a model's name, ports or rows cannot be served.
var ErrInfo = errors.New("engine: invalid model")

// Check tests a call against the model's inputs: that none is missing but Optional
// ones, their names and order, data types, shapes, chunk sizes, and that all row-split inputs have equally
// many rows, which it returns: without inputs none, the outputs tell. It tests
// the params, too. Errors are *InputError or wrap ErrParam. Every engine's Open
// begins with it.
func (i Info) Check(c Call) (rows int64, err error) {
	if i = i.Of(c.Inputs); len(c.Inputs) != len(i.Inputs) {
		port := "*"
		if n := len(c.Inputs); n < len(i.Inputs) {
			port = i.Inputs[n].Name
		}
		return 0, &InputError{i.Name, port, fmt.Sprintf("%d inputs", len(i.Inputs)), fmt.Sprint(len(c.Inputs))}
	}
	first := ""
	for p, port := range i.Inputs {
		in := c.Inputs[p]
		refuse := func(want, got string) error { return &InputError{i.Name, port.Name, want, got} }
		if in.Port != port.Name {
			return 0, refuse(fmt.Sprintf("input %d to be it", p), fmt.Sprintf("%q", in.Port))
		}
		if in.ChunkBytes < 1 {
			return 0, refuse("chunks of 1 byte or more", fmt.Sprint(in.ChunkBytes))
		}
		if _, err := in.Desc.Bytes(); err != nil {
			return 0, refuse("a tensor", err.Error())
		}
		if !port.fits(in.Desc) {
			return 0, refuse(port.wants(), in.Desc.String())
		}
		if port.Whole {
			continue
		}
		n, _, err := in.Desc.Rows(i.Axes(len(in.Desc.Shape)))
		if err != nil {
			return 0, refuse("a tensor", err.Error())
		}
		if first != "" && n != rows {
			return 0, refuse(fmt.Sprintf("%d rows, as input %q has", rows, first), fmt.Sprint(n))
		}
		first, rows = port.Name, n
	}
	return rows, i.CheckParams(c.Params)
}

// Kinds are the kinds of params whose text is checked before a call is opened: number or float,
// int, bool, and Go's duration. It is read-only. nil means that the text is right.
var Kinds = map[string]func(text string) error{
	"number":   float,
	"float":    float,
	"int":      func(text string) error { _, err := strconv.ParseInt(text, 10, 64); return err },
	"bool":     func(text string) error { _, err := strconv.ParseBool(text); return err },
	"duration": func(text string) error { _, err := time.ParseDuration(text); return err },
}

func float(text string) error { _, err := strconv.ParseFloat(text, 64); return err }

// CheckParams refuses params that the model does not declare, and texts that are not of their
// kinds. Errors wrap ErrParam.
func (i Info) CheckParams(params map[string]string) error {
	if len(params) == 0 { // as of most small calls
		return nil
	}
	for _, name := range slices.Sorted(maps.Keys(params)) {
		at := slices.IndexFunc(i.Params, func(p Param) bool { return p.Name == name })
		if at < 0 {
			known := "it takes none"
			if len(i.Params) > 0 {
				known = "known are"
				for n, p := range i.Params {
					known += []string{" ", ", "}[min(n, 1)] + p.Name
				}
			}
			return fmt.Errorf("%w: model %q has no param %q; %s", ErrParam, i.Name, name, known)
		}
		kind := i.Params[at].Kind
		if check := Kinds[kind]; check != nil && check(params[name]) != nil {
			return fmt.Errorf("%w: %q: wanted a %s, got %q", ErrParam, name, kind, params[name])
		}
	}
	return nil
}

// Check tests a desc against an output port.
func (p Port) Check(d tensor.Desc) error {
	if _, err := d.Bytes(); err != nil {
		return fmt.Errorf("output %q: %w", p.Name, err)
	}
	if !p.fits(d) {
		return fmt.Errorf("output %q is %v, its info says %s", p.Name, d, p.wants())
	}
	return nil
}

// fits reports whether a tensor of this desc may come in, or go out, at p.
func (p Port) fits(d tensor.Desc) bool {
	if len(p.DTypes) > 0 && !slices.Contains(p.DTypes, d.DType) {
		return false
	}
	want, got := p.Shape, d.Shape
	if len(want) > 0 && want[0] == AnyAxes {
		want = want[1:]
		if len(got) < len(want) {
			return false
		}
		got = got[len(got)-len(want):]
	}
	return slices.EqualFunc(want, got, func(w, g int64) bool { return w == Free || w == g })
}

// wants says in words what fits.
func (p Port) wants() string {
	types := "any data type"
	if len(p.DTypes) > 0 {
		types = strings.ReplaceAll(strings.Trim(fmt.Sprintf("%v", p.DTypes), "[]"), " ", " or ")
	}
	dims := strings.NewReplacer(fmt.Sprint(AnyAxes), "...", fmt.Sprint(Free), "any").Replace(fmt.Sprint(p.Shape))
	return types + " of shape " + dims
}

// Validate tests what a model says about itself. Errors wrap ErrInfo.
func (i Info) Validate() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: model %q: %s", ErrInfo, i.Name, fmt.Sprintf(format, args...))
	}
	if !validName(i.Name) {
		return bad("a name is 1 to %d bytes of UTF-8 without control characters", maxNameBytes)
	}
	if i.Rows < AllButLast {
		return bad("rows are %d; wanted a number of axes, AllAxes or AllButLast", i.Rows)
	}
	if i.BlockRows < 0 {
		return bad("%d rows per block; wanted 0 or more", i.BlockRows)
	}
	split := slices.ContainsFunc(i.Inputs, func(p Port) bool { return !p.Whole && !p.Optional })
	if len(i.Inputs) > 0 && !split || len(i.Outputs) == 0 {
		return bad("needs an input that is neither Whole nor Optional, or none at all, and an output")
	}
	for n, p := range i.Params {
		if !validName(p.Name) {
			return bad("param %q: a name is 1 to %d bytes of UTF-8 without control characters", p.Name, maxNameBytes)
		}
		if slices.ContainsFunc(i.Params[:n], func(o Param) bool { return o.Name == p.Name }) {
			return bad("two params are named %q", p.Name)
		}
		if check := Kinds[p.Kind]; check != nil && p.Default != "" && check(p.Default) != nil {
			return bad("param %q: its default, %q, is not a %s", p.Name, p.Default, p.Kind)
		}
	}
	for _, ports := range [][]Port{i.Inputs, i.Outputs} {
		if len(ports) > maxPorts {
			return bad("%d ports in one direction; a call carries at most %d", len(ports), maxPorts)
		}
		seen := make(map[string]bool)
		for _, p := range ports {
			if !validName(p.Name) || seen[p.Name] {
				return bad("port %q: a name is unique, 1 to %d bytes of UTF-8 without control characters", p.Name, maxNameBytes)
			}
			seen[p.Name] = true
			for _, d := range p.DTypes {
				if !d.Valid() {
					return bad("port %q: %v is not a data type", p.Name, d)
				}
			}
			for axis, d := range p.Shape {
				if d < Free && (d != AnyAxes || axis > 0) || d > tensor.MaxDim {
					return bad("port %q: dimension %d is %d", p.Name, axis, d)
				}
			}
		}
	}
	return nil
}

func validName(name string) bool {
	return name != "" && len(name) <= maxNameBytes && utf8.ValidString(name) && !strings.ContainsFunc(name, unicode.IsControl)
}
