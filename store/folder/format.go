package folder

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/tensorferry/tensorferry/codec"
	"github.com/tensorferry/tensorferry/internal/shelf"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/tensorfile"
)

// Names in a folder. docs/store.md describes them.
const (
	lockFile     = ".lock"
	manifestFile = ".set"
	tempPrefix   = ".push-"
	tempSuffix   = ".tmp"
	pushedEntry  = "tensor" // the name of the only tensor in a pushed file

	keyName   = shelf.OwnKeys + "name"
	keyDType  = shelf.OwnKeys + "dtype"
	keyShape  = shelf.OwnKeys + "shape"
	keyDigest = shelf.OwnKeys + "digest"
	keyStored = shelf.OwnKeys + "stored"
)

// storedLayout always has nine decimals, so that all times have the same length.
const storedLayout = "2006-01-02T15:04:05.000000000Z"

// fileName returns the file of a pushed tensor. It is a hash, so that a rename replaces the
// older tensor of the same name, and no name becomes a path.
func fileName(name string) string {
	sum := sha256.Sum256([]byte(name))
	return hex.EncodeToString(sum[:]) + tensorfile.FileSuffix
}

// isPushedName reports whether file is what fileName returns for some name.
func isPushedName(file string) bool {
	digits, ok := strings.CutSuffix(file, tensorfile.FileSuffix)
	return ok && len(digits) == 2*sha256.Size && strings.Trim(digits, "0123456789abcdef") == ""
}

// U+FFFD is escaped as in URLs: some JSON readers substitute it for invalid text, and
// tensorfile refuses it.
var escapeName = strings.NewReplacer("%", "%25", string(utf8.RuneError), "%EF%BF%BD")

// onDisk returns how a .safetensors file describes a tensor. The format has no
// complex128: it becomes float64 with a last axis of 2 or, if the rank does not allow
// that, with a single axis.
func onDisk(d tensor.Desc) tensor.Desc {
	if d.DType != tensor.Complex128 {
		return d
	}
	d = tensor.Desc{DType: tensor.Float64, Shape: append(d.Shape.Clone(), 2)}
	if len(d.Shape) > tensor.MaxRank {
		n, _ := d.Shape[:tensor.MaxRank].Elements() // checked when the desc's size was computed
		d.Shape = tensor.Shape{2 * n}
	}
	return d
}

// pushedHeader returns the header of a pushed tensor's file. Its length does not depend on
// the digest or the time.
func pushedHeader(info store.Info) ([]byte, error) {
	return tensorfile.SafetensorsHeader([]tensorfile.Entry{{Name: pushedEntry, Desc: onDisk(info.Desc)}}, pushedMetadata(info))
}

// pushedMetadata returns the store's metadata of a pushed tensor, and what was pushed with it.
func pushedMetadata(info store.Info) map[string]string {
	all := map[string]string{
		keyName:   escapeName.Replace(info.Name),
		keyDType:  info.DType.String(),
		keyShape:  strings.Trim(strings.ReplaceAll(info.Shape.String(), " ", ","), "[]"),
		keyDigest: codec.DigestPrefix + hex.EncodeToString(info.Digest[:]),
		keyStored: info.Stored.UTC().Format(storedLayout),
	}
	for key, value := range info.Metadata {
		all[escapeName.Replace(key)] = escapeName.Replace(value)
	}
	return all
}

// pushedInfo reads what pushedHeader wrote. Errors wrap tensorfile.ErrFormat.
func pushedInfo(file string, st *tensorfile.Safetensors) (store.Info, error) {
	meta := st.Metadata()
	info := store.Info{Durable: true}
	info.Name, _ = url.PathUnescape(meta[keyName])
	info.DType, _ = tensor.ParseDataType(meta[keyDType])
	info.Shape, _ = tensor.ParseShape(meta[keyShape])
	info.Digest, _ = codec.ParseDigest(meta[keyDigest])
	info.Stored, _ = time.Parse(storedLayout, meta[keyStored])
	wrong := ""
	for key, text := range meta {
		if !strings.HasPrefix(key, shelf.OwnKeys) {
			key, err := url.PathUnescape(key)
			value, bad := url.PathUnescape(text)
			if err != nil || bad != nil {
				wrong = "metadata"
			}
			if info.Metadata == nil {
				info.Metadata = map[string]string{}
			}
			info.Metadata[key] = value
		}
	}
	for key, text := range pushedMetadata(info) {
		if meta[key] != text { // also if it could not be read
			wrong = key
		}
	}
	if shelf.CheckMetadata(info.Metadata) != nil {
		wrong = "metadata"
	}
	if store.CheckName(info.Name) != nil || fileName(info.Name) != file {
		wrong = keyName
	}
	if d, err := st.Desc(pushedEntry); err != nil || len(st.Names()) != 1 || !d.Equal(onDisk(info.Desc)) {
		wrong = cmp.Or(wrong, pushedEntry)
	}
	if wrong != "" {
		return store.Info{}, fmt.Errorf("%w: pushed tensor: its %s is wrong", tensorfile.ErrFormat, wrong)
	}
	return info, nil
}

// readPushed reads the header of a file that may be a pushed tensor's, and returns the
// file's length.
func readPushed(dir, file string) (info store.Info, bytes int64, err error) {
	path := filepath.Join(dir, file)
	stat, err := os.Stat(path)
	if err != nil {
		return store.Info{}, 0, err
	}
	st, err := tensorfile.OpenSafetensors(path)
	if err != nil {
		return store.Info{}, 0, err
	}
	info, err = pushedInfo(file, st)
	return info, stat.Size(), errors.Join(err, st.Close())
}
