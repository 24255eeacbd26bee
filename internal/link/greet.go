package link

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"time"
)

// Greeting is the JSON of hello.
type Greeting struct {
	Link    int    `json:"link"`
	Version string `json:"version"` // of the program or the package
	Role    string `json:"role,omitempty"`
	PID     int    `json:"pid,omitempty"`
	Memory  int64  `json:"memory,omitempty"` // bytes of the quota, wished or had; 0: any
}

// Greet waits for the hello of a guest and answers it with own, and what memory makes
// of the quota that the guest wishes. It comes before New. A guest of another role or
// version gets the answer, and is an error.
func Greet(socket *net.UnixConn, wait time.Duration, own Greeting, memory func(wished int64) int64) (guest Greeting, err error) {
	if err := socket.SetDeadline(time.Now().Add(wait)); err != nil {
		return Greeting{}, fmt.Errorf("link: hello: %w", err)
	}
	packet := make([]byte, PacketBytes+1)
	n, err := socket.Read(packet)
	if err != nil {
		return Greeting{}, fmt.Errorf("link: hello: %w", err)
	}
	m, err := Parse(packet[:n])
	if err != nil {
		return Greeting{}, err
	}
	hello, ok := m.(*Hello)
	if !ok {
		return Greeting{}, fmt.Errorf("%w: kind %d came before hello", ErrMessage, KindOf(m))
	}
	if err = json.Unmarshal(hello.JSON, &guest); err != nil {
		err = fmt.Errorf("%w: hello: %w", ErrMessage, err)
	} else if guest.Link != Version || guest.Version != own.Version || guest.Role != own.Role {
		err = fmt.Errorf("link: the other side is a %s of version %s, link %d; this one wants a %s of version %s, link %d",
			guest.Role, guest.Version, guest.Link, own.Role, own.Version, Version)
	}
	own.Link, own.Memory = Version, memory(guest.Memory)
	text, bad := json.Marshal(own)
	if bad == nil {
		packet, bad = Append(packet[:0], &Hello{JSON: text})
	}
	if bad == nil {
		_, bad = socket.Write(packet)
	}
	return guest, errors.Join(err, bad, socket.SetDeadline(time.Time{}))
}
