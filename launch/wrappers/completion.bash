# Completion of `python -m launch` for bash; `eval "$(python -m launch -sc install=bash)"` in ~/.bashrc or by hand.
# The answers come from Hydra. What completed other `python ...` lines before goes on doing so.

_libra_python_before() {
    local rule
    rule=$(complete -p python 2> /dev/null)
    case "$rule" in
        *_libra_completion*) ;;
        *" -F "*) rule=${rule#* -F } && printf '%s' "${rule%% *}" ;;
    esac
}

_libra_completion() {
    local before=$_LIBRA_PYTHON_BEFORE
    if [[ ! $COMP_LINE =~ ^[^[:space:]]+[[:space:]]+-m[[:space:]]+launch[[:space:]](.*)$ ]]; then
        [ -z "$before" ] || "$before" "$@"
        return
    fi
    local typed=${COMP_LINE:0:COMP_POINT}
    typed=${typed#*-m*launch}
    local word=${typed##*[[:space:]]} choices choice
    # Hydra takes the first word of the line for the name of the command.
    choices=$(COMP_LINE="launch $typed" COMP_POINT=$COMP_POINT "$1" -m launch -sc query=bash 2> /dev/null)
    COMPREPLY=()
    # Not compgen -W, which would run what stands in $( ) in a value.
    while read -r choice; do
        [[ $choice != "$word"* ]] || COMPREPLY+=("$choice")
    done <<< "${choices// /$'\n'}"
    # "=" ends a word for readline, also where bash does not; it replaces only what comes after it.
    case "$COMP_WORDBREAKS" in
        *=*) [[ $word != *=* ]] || COMPREPLY=("${COMPREPLY[@]#"${word%=*}="}") ;;
    esac
}

libra_completion_uninstall() {
    complete -r python python3 2> /dev/null
    [ -z "$_LIBRA_PYTHON_BEFORE" ] || complete -o default -F "$_LIBRA_PYTHON_BEFORE" python python3
    unset _LIBRA_PYTHON_BEFORE
    unset -f _libra_completion _libra_python_before libra_completion_uninstall
}

_LIBRA_PYTHON_BEFORE=${_LIBRA_PYTHON_BEFORE:-$(_libra_python_before)}
complete -o nospace -o default -F _libra_completion python python3
