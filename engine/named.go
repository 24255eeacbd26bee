package engine

import "io"

// Named is m under another name. Closing it closes m.
func Named(name string, m Model) Model { return &named{m, name} }

type named struct {
	Model
	name string
}

// unnamed is the model under all the names it was given.
func unnamed(m Model) Model {
	for {
		n, ok := m.(*named)
		if !ok {
			return m
		}
		m = n.Model
	}
}

// Info returns m's info with the new name.
func (n *named) Info() Info {
	i := n.Model.Info()
	i.Name = n.name
	return i
}

// Close closes the model, if it can be closed.
func (n *named) Close() error {
	if c, ok := n.Model.(io.Closer); ok {
		return c.Close()
	}
	return nil
}
