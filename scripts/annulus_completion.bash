# Sourced by bash, or installed as share/bash-completion/completions/annulus: completes the commands
# and options of annulus, as its own help lists them, and the words that an option's help offers.
_annulus() {
  local program=${COMP_WORDS[0]} current=${COMP_WORDS[COMP_CWORD]}
  local previous=${COMP_WORDS[COMP_CWORD - 1]} command=${COMP_WORDS[1]} words
  COMPREPLY=()
  if ((COMP_CWORD == 1)) || [[ $previous == help ]]; then
    words=$("$program" --help 2>/dev/null | sed -n 's/^  \([a-z]\{1,\}\)  .*/\1/p')
    ((COMP_CWORD > 1)) || words+=" help --help --version"
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
  elif [[ $current == -* ]]; then
    words=$("$program" "$command" --help 2>/dev/null | sed -n 's/^  \(--[a-z-]*\).*/\1/p')
    mapfile -t COMPREPLY < <(compgen -W "$words --help" -- "$current")
  elif [[ $previous == --impl ]]; then
    words=$("$program" info 2>/dev/null |
      sed -n '/^# implementations/,/^# schedules/s/^  \([a-z0-9_]*\) .*/\1/p')
    mapfile -t COMPREPLY < <(compgen -W "auto $words" -- "$current")
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

# Completes the words after annulus on a line of mpirun. Without a reply, bash's own completion
# works.
_annulus_launched() {
  local i
  COMPREPLY=()
  for ((i = 1; i < COMP_CWORD; ++i)); do
    [[ /${COMP_WORDS[i]} == */annulus ]] || continue
    COMP_WORDS=("${COMP_WORDS[@]:i}")
    ((COMP_CWORD -= i))
    _annulus
    return
  done
}
for launcher in mpirun mpiexec srun; do
  complete -p "$launcher" &>/dev/null ||
    complete -o bashdefault -o default -F _annulus_launched "$launcher"
done
unset launcher
