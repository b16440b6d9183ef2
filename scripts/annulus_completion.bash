# Sourced by bash, or installed as share/bash-completion/completions/annulus: completes the commands
# and options of annulus, as its own help lists them, and the words that an option's help offers.
_annulus() {
  local program=${COMP_WORDS[0]} current=${COMP_WORDS[COMP_CWORD]}
  local previous=${COMP_WORDS[COMP_CWORD - 1]} command=${COMP_WORDS[1]} words
  COMPREPLY=()
  if ((COMP_CWORD == 1)); then
    words=$("$program" --help 2>/dev/null | sed -n 's/^  \([a-z]\{1,\}\) .*/\1/p')
    mapfile -t COMPREPLY < <(compgen -W "$words --help --version" -- "$current")
  elif [[ $current == -* ]]; then
    words=$("$program" "$command" --help 2>/dev/null | sed -n 's/^  \(--[a-z-]*\).*/\1/p')
    mapfile -t COMPREPLY < <(compgen -W "$words --help" -- "$current")
  else
    # "auto, zigzag, contiguous or striped: …" offers four words.
    words=$("$program" "$command" --help 2>/dev/null |
      sed -n "s/^  $previous [A-Z]*  *\([a-z0-9_]*\(, [a-z0-9_]*\)* or [a-z0-9_]*\).*/\1/p")
    words=${words// or /,}
    mapfile -t COMPREPLY < <(compgen -W "${words//,/ }" -- "$current")
    # Anything else is most likely a file.
    ((${#COMPREPLY[@]} > 0)) || mapfile -t COMPREPLY < <(compgen -f -- "$current")
  fi
}
complete -F _annulus annulus
