package enginetest

import "github.com/tensorferry/tensorferry/engine"

// Named is m under another name. Closing it closes m.
func Named(name string, m engine.Model) engine.Model { return &named{m, name} }

type named struct {
	engine.Model
	name string
}

// Info returns m's info with the new name.
func (n *named) Info() engine.Info {
	i := n.Model.Info()
	i.Name = n.name
	return i
}

// Unwrap returns the model under the name.
func (n *named) Unwrap() engine.Model { return n.Model }
