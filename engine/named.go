package engine

// Named is m under another name. Closing it closes m.
func Named(name string, m Model) Model { return &named{m, name} }

type named struct {
	Model
	name string
}

// Info returns m's info with the new name.
func (n *named) Info() Info {
	i := n.Model.Info()
	i.Name = n.name
	return i
}

// Unwrap returns the model under the name.
func (n *named) Unwrap() Model { return n.Model }
