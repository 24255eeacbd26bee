//go:build race

package link

const race = true
