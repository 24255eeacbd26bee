package tensorfile

import "io"

// lazy opens a reader when it is first read.
type lazy struct {
	open func() (io.Reader, error)
	r    io.Reader // nil until then
}

func (l *lazy) Read(p []byte) (int, error) {
	if l.r == nil {
		r, err := l.open()
		if err != nil {
			return 0, err
		}
		l.r, l.open = r, nil
	}
	return l.r.Read(p)
}

// HoldBack returns a reader of the first size bytes of r. It yields the last one, or EOF if there
// is none, only after a nil verdict, which is always the same.
func HoldBack(r io.Reader, size int64, verdict func() error) io.Reader {
	return &heldBack{r, size, verdict}
}

type heldBack struct {
	r       io.Reader
	left    int64
	verdict func() error
}

func (h *heldBack) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	if h.left > 1 {
		n, err := h.r.Read(p[:min(int64(len(p)), h.left-1)])
		h.left -= int64(n)
		return n, err
	}
	n, err := io.ReadFull(h.r, p[:h.left]) // one byte or none
	if err == nil {
		h.left = 0
		err = h.verdict()
	}
	if err == nil && n == 0 {
		err = io.EOF
	}
	if err != nil {
		n = 0
	}
	return n, err
}
