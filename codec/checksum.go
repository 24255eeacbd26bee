// Package codec checks and compresses chunks, and digests whole tensors. It refuses to
// take more than a bounded amount of memory for the whole process, whatever peers send.
// It keeps nothing that it borrows and hands over what it encoded. Safe for concurrent
// use.
package codec

import (
	"encoding/binary"
	"hash/crc32"

	"golang.org/x/sys/cpu"

	"github.com/tensorferry/tensorferry/tensor"
)

// Checksum is the kind of a chunk's checksum. The numbers are those of the wire
// (tensorferry.v1.Checksum).
type Checksum uint8

// The kinds. There is no way to ask for none: a chunk is always checked.
const (
	CRC32C Checksum = 1 // Castagnoli polynomial, in hardware on amd64 and arm64
	CRC32  Checksum = 2 // IEEE polynomial, which every standard library has
)

// Fastest returns the kind that this machine computes fastest over memory outside its
// caches. With VPCLMULQDQ the standard library folds 256 bytes of an IEEE CRC at a time,
// 26 GB/s of such memory; the CRC32 instruction of CRC-32C, in three rows, reached 10 and,
// in the cache, 26 (AMD EPYC, November 2026: BenchmarkUpdate). On arm64 they are alike.
func Fastest() Checksum {
	if cpu.X86.HasAVX512VPCLMULQDQ && cpu.X86.HasAVX512VL { // also of the system
		return CRC32
	}
	return CRC32C
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Valid reports whether c is a kind this build computes.
func (c Checksum) Valid() bool { return c == CRC32C || c == CRC32 }

func (c Checksum) table() *crc32.Table {
	if c == CRC32 {
		return crc32.IEEETable
	}
	return castagnoli
}

// Seed begins a chunk's checksum with the tensor's 16 ID bytes and the index as 4
// little-endian bytes: a chunk delivered as another one fails its check.
func (c Checksum) Seed(id tensor.ID, index uint32) uint32 {
	var name [20]byte
	copy(name[:16], id[:])
	binary.LittleEndian.PutUint32(name[16:], index)
	// By table: crc32.Update calls through a variable, so name would be allocated each time.
	table, sum := c.table(), ^uint32(0)
	for _, b := range name {
		sum = table[byte(sum)^b] ^ sum>>8
	}
	return ^sum
}

// UpdateCold is Update for bytes that no cache holds, such as those that a sender is
// about to send; it borrows them. CRC-32C reads three rows at a time, which the processor
// does not fetch ahead, so each piece is read through before: 16 GB/s of such memory, not
// 10 (AMD EPYC, November 2026: BenchmarkUpdate).
func (c Checksum) UpdateCold(sum uint32, data []byte) uint32 {
	if c != CRC32C {
		return c.Update(sum, data)
	}
	for len(data) > 0 {
		piece := data[:min(len(data), fetchBytes)]
		fetch(piece)
		sum = c.Update(sum, piece)
		data = data[len(piece):]
	}
	return sum
}

// fetch reads a byte of each cache line. It is not inlined, or nothing of it would be left.
//
//go:noinline
func fetch(data []byte) (all byte) {
	for i := 0; i < len(data); i += 64 {
		all ^= data[i]
	}
	return all
}

// Update continues a checksum over more bytes of the chunk, which it borrows.
func (c Checksum) Update(sum uint32, data []byte) uint32 {
	return crc32.Update(sum, c.table(), data)
}
