//go:build linux

package roads

import "time"

const (
	// DefaultRate is that of a good line between two offices, in bits per second.
	DefaultRate = 1_000_000_000
	// DefaultMTU is Ethernet's.
	DefaultMTU = 1500
	// DefaultCongestion is what users have unless they chose something else.
	DefaultCongestion = "cubic"
	// leastMTU is IPv4's own minimum for a host that sends fragments; mostMTU is a TUN
	// device's.
	leastMTU, mostMTU = 576, 65535
	// mostDelay, mostRate and mostQueue bound what a way holds: the queue, and rate × delay.
	mostDelay = 10 * time.Second
	mostRate  = 100_000_000_000
	mostQueue = 1 << 30
	// leastQueue is the packets that a queue without a size holds at least: the bursts of ten
	// that two TCP connections begin with.
	leastQueue = 20
	// passPackets is how many packets are read before what is due is written.
	passPackets = 32
	// smallBytes is up to which size a packet is copied out of its large buffer, so that
	// acknowledgements do not pin an MTU each.
	smallBytes = 256
	// deviceQueue is the packets that the kernel holds until they are read: 9 MB at MTU 9000.
	deviceQueue = 1000
	// setUpWait is how long the namespace of an end may take to be there, on a loaded machine.
	setUpWait = 30 * time.Second
	// endWait is how long the processes of an end may take to be gone.
	endWait = 10 * time.Second
	// listenBacklog is the connections that wait to be accepted.
	listenBacklog = 128
)
